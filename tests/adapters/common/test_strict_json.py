"""A JSON text's items are counted outside its strings, piece by piece."""

import json

from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.common.strict_json import count_items, outside_strings

# Longer than a piece; each holds what is counted outside strings, and what ends none.
_STRINGS = st.sampled_from(["", "a,b", '\\"', '",:[{', "\\\\", "x" * 17_001, '\\",' * 6_001])


@given(st.lists(st.tuples(_STRINGS, _STRINGS), max_size=12))
def test_strings_are_cut_out_wherever_a_piece_ends(pairs: list[tuple[str, str]]) -> None:
    text = json.dumps([{name: value} for name, value in pairs], separators=(",", ":")).encode()
    bare = json.dumps([{"": ""} for _ in pairs], separators=(",", ":")).encode()
    assert outside_strings(text) == bare.replace(b'""', b"")
    assert count_items(outside_strings(text)) == count_items(bare)
