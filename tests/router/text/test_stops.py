"""Stop strings: the stream against a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from router.text.stops import StopMatcher

WORDS = st.text(alphabet="ab€", min_size=1, max_size=5)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The match that ends first, and of those the longest."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def pieces(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]


@given(
    st.text(alphabet="ab€", max_size=60),
    st.lists(WORDS, max_size=4),
    st.lists(st.integers(0, 60), max_size=20),
    st.booleans(),
)
def test_equals_a_search_of_the_whole_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(tuple(stops), include)
    released = "".join(matcher.push(piece) for piece in pieces(text, cuts)) + matcher.flush()
    assert (released, matcher.hit) == naive(text, stops, include)


@given(st.text(alphabet="ab", max_size=40), st.lists(WORDS, min_size=1, max_size=3))
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops), include=False)
    out = ""
    for end in range(1, len(text) + 1):
        out += matcher.push(text[end - 1])
        if matcher.hit is not None:
            return
        held = text[len(out) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_kept_stop_strings_hold_nothing_back() -> None:
    matcher = StopMatcher(("abc",), include=True)
    assert [matcher.push(c) for c in "xabcd"] == ["x", "a", "b", "c", ""]


def test_same_end_prefers_the_longest() -> None:
    matcher = StopMatcher(("c", "abc"), include=False)
    assert matcher.push("xabc") == "x"
    assert matcher.hit == "abc"
