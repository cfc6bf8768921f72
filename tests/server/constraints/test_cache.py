"""What the store of compiled grammars keeps."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.constraints.compilations import BoundedCache

keys = st.sampled_from(["a", "bb", "ccc", "é", "dddd", "ee"])


@given(st.integers(0, 4), st.integers(0, 8), st.lists(st.tuples(st.booleans(), keys)))
def test_the_last_used_are_kept_within_both_bounds(
    max_entries: int, max_bytes: int, uses: list[tuple[bool, str]]
) -> None:
    cache = BoundedCache[int](max_entries, max_bytes)
    kept: OrderedDict[str, int] = OrderedDict()
    for number, (put, key) in enumerate(uses):
        if put:
            cache.put(key, number)
            kept[key] = number
            kept.move_to_end(key)
            while len(kept) > max_entries or len("".join(kept).encode()) > max_bytes:
                kept.popitem(last=False)
        else:
            assert cache.get(key) == kept.get(key)
            if key in kept:
                kept.move_to_end(key)
