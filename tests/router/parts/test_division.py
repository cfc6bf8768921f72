"""Answers divided into text, reasoning and calls, however they are cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.router.parts.division import DividedAnswer, Division
from loraplex.router.parts.parts import NOTHING, CallDelta, PartsDelta, ToolCall
from tests.router.parts.readers import BracketReader, ThinkReader, joined, numbered

DIVISION = Division((ThinkReader, BracketReader))
ANSWER = "I think|Let me [add 1, 2] and [sub 3]."


def divide(
    pieces: list[str], hidden: frozenset[str] = frozenset()
) -> tuple[DividedAnswer, PartsDelta]:
    answer = DividedAnswer(DIVISION, numbered(), hidden)
    found = NOTHING
    for piece in pieces:
        found = joined(found, answer.feed(piece, is_last=False))
    return answer, joined(found, answer.feed("", is_last=True))


@settings(max_examples=100)
@given(st.lists(st.integers(0, len(ANSWER)), max_size=8))
def test_any_cut_gives_the_same_parts(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(ANSWER)]
    pieces = [ANSWER[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    answer, found = divide(pieces)
    assert found.text == "Let me  and ."
    assert found.reasoning == answer.reasoning == "I think"
    assert answer.calls == (ToolCall("id0", "add", "1, 2"), ToolCall("id1", "sub", "3"))
    for number, call in enumerate(answer.calls):
        first, *rest = [delta for delta in found.calls if delta.index == number]
        assert (first.id, first.name) == (call.id, call.name)
        assert {(delta.id, delta.name) for delta in rest} <= {(None, None)}
        assert "".join(delta.arguments for delta in (first, *rest)) == call.arguments


def test_what_is_held_back_at_the_end_passes_the_later_readers() -> None:
    answer = DividedAnswer(Division((BracketReader, ThinkReader)), numbered())
    assert answer.feed("ab", is_last=False) == PartsDelta(reasoning="a")
    assert answer.feed("", is_last=True) == PartsDelta(reasoning="b")


def test_a_call_that_breaks_off_stays_as_far_as_it_came() -> None:
    answer, found = divide(["|[add 1, "])
    assert answer.calls == (ToolCall("id0", "add", "1, "),)
    assert found.calls[0] == CallDelta(0, "add", "", "id0")


def test_hidden_markers_are_in_no_part() -> None:
    answer, found = divide(["a<mark>b|c", "<mark>", "d"], frozenset(("<mark>",)))
    assert (found.text, answer.reasoning) == ("cd", "a<mark>b".replace("<mark>", ""))
