"""Stop strings: the stream against a search of the whole text."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.router.text.stops import StopMatcher

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


class Item(NamedTuple):
    """A piece of the text, or a token that is not in it. is_late: the text comes after the items
    that follow, up to one that is not late.
    """

    text: str
    is_hidden: bool
    is_late: bool


ITEMS = st.builds(
    Item, st.text(alphabet="ab€", min_size=1, max_size=4), st.booleans(), st.booleans()
)


def naive_views(items: Sequence[Item], stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, in both views; of two matches alike the one that leaves less."""
    visible, spelled, places = "", "", []
    for item in items:
        for character in item.text:
            places.append(len(visible))
            spelled += character
            found = []
            if not item.is_hidden:
                visible += character
                found = [(-len(s), len(visible) - len(s), s) for s in stops if visible.endswith(s)]
            found += [(-len(s), places[-len(s)], s) for s in stops if spelled.endswith(s)]
            if not found:
                continue
            _, start, stop = min(found)
            return (visible if include else visible[:start]), stop
    return visible, None


def run_views(matcher: StopMatcher, items: Sequence[Item]) -> str:
    out, held = "", ""
    for item in items:
        if item.is_hidden:
            out += matcher.spell(held, item.text)
        else:
            held += item.text
            if not item.is_late:
                out += matcher.push(held)
                held = ""
    return out + matcher.push(held) + matcher.flush()


@settings(max_examples=600)
@given(st.lists(ITEMS, max_size=12), st.lists(WORDS, max_size=4), st.booleans())
def test_tokens_that_the_text_lacks_are_searched_in_their_place(
    items: list[Item], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(tuple(stops), include)
    released = run_views(matcher, items)
    assert (released, matcher.hit) == naive_views(items, stops, include)


def test_a_token_between_ends_neither_view() -> None:
    items = [Item("xa", False, False), Item("<|e|>", True, False), Item("b", False, False)]
    for stop, text in (
        ("ab", "x"),
        ("a<|e|>", "x"),
        ("<|e|>", "xa"),
        ("|>b", "xa"),
        ("a<|e|>b", "x"),
    ):
        matcher = StopMatcher((stop,), False)
        assert (run_views(matcher, items), matcher.hit) == (text, stop)


def test_what_was_held_back_may_come_out_otherwise() -> None:
    """Bytes that spelled a character until another byte made them invalid."""
    matcher = StopMatcher(("b��", "c"), False)
    assert matcher.push("a") == "a"
    assert matcher.spell("€", "<e>") == ""
    assert matcher.push("���b") == "���"
    assert matcher.push("��") == ""
    assert matcher.hit == "b��"


def test_many_stop_strings_at_all_borders() -> None:
    """500 of them, each found wherever the text is cut and whatever stands before it."""
    stops = [f"{number:03}" * (1 + number % 3) + "!" for number in range(500)]
    for number, stop in enumerate(stops):
        text = f"x{stop[:-1]}{stop}"
        for cut in range(len(text) + 1):
            matcher = StopMatcher((stop, *stops[max(0, number - 5) : number]), False)
            released = matcher.push(text[:cut]) + matcher.push(text[cut:]) + matcher.flush()
            assert (released, matcher.hit) == naive(text, [stop], False)
