"""Each place of a draft has the mask that it has without the draft, whatever the draft says."""

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from loraplex.adapters.grammar import compile as compile_module
from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.server.constraints.constraint import Constraint
from loraplex.server.constraints.constraints import Constraints
from loraplex.server.constraints.rules import TokenRules, mask_words
from loraplex.server.constraints.wishes import AsideWish, ConstraintWish, ForesightWish, MaskWish
from loraplex.server.protocol import SamplingParams
from tests.server.constraints.grammar_harness import compiled, constraint_of
from tests.server.constraints.grammars import GRAMMARS
from tests.server.constraints.serving import EOS, VOCAB, constraints, text, tokens, vocabulary
from tests.server.engine.worker_end import TIMEOUT_S

WORDS = mask_words(VOCAB)
SAMPLINGS = {
    "grammar alone": {},
    "min tokens": {"min_tokens": 6},
    "bad words": {"bad_words": ((22, 17), (7, 7), tuple(tokens("no")))},
}


def allowed_by(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def mask_of(constraint: Constraint) -> list[int]:
    row = np.full(WORDS, 77, np.int32)
    constraint.fill(row)
    return allowed_by(row)


def masks_of(constraint: Constraint, draft: list[int]) -> list[list[int]]:
    rows = np.full((1 + len(draft), WORDS), 77, np.int32)
    constraint.fill(rows[0])
    constraint.fill_ahead(draft, rows[1:], lambda: True)
    return [allowed_by(row) for row in rows]


def test_an_end_comes_with_the_last_token_that_min_tokens_asks_for() -> None:
    letter, least = tokens("x")[-1], 3
    sampling = SamplingParams(grammar="start: /x+/", min_tokens=least)
    constraint = constraint_of(ConstraintWish(1, sampling, ()))
    for taken in range(least + 2):
        assert any(end in mask_of(constraint) for end in EOS) is (taken >= least)
        constraint.take(letter)


class Answer:
    """Of a grammar, drawn at random token by token, with the mask before each."""

    def __init__(self, wish: ConstraintWish, data: st.DataObject) -> None:
        plain = constraint_of(wish)
        self.tokens, self.masks = list[int](), list[list[int]]()
        while len(self.tokens) < 24:
            mask = mask_of(plain)
            if plain.state != "open":
                break
            token = data.draw(st.sampled_from(mask))
            self.masks.append(mask)
            self.tokens.append(token)
            if token in EOS or plain.take(token) != "open":
                break
        self.state = plain.state


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=12)
@given(data=st.data())
def test_masks_and_states_are_those_without_drafts(
    name: str, how: str, data: st.DataObject
) -> None:
    sampling = SamplingParams(grammar=GRAMMARS[name], **SAMPLINGS[how])  # type: ignore[arg-type]
    wish = ConstraintWish(1, sampling, ())
    answer, constraint = Answer(wish, data), constraint_of(wish)
    count = 0
    while count < len(answer.tokens):
        right = data.draw(st.integers(0, 5))
        draft = answer.tokens[count : count + right]
        draft += data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
        foresight = constraint.foresee(draft, len(draft))
        masks = masks_of(constraint, draft)
        # What may follow one another by the masks is what was foreseen, but for ends.
        possible = [t in mask and t not in EOS for t, mask in zip(draft, masks, strict=False)]
        assert foresight.allowed == [*possible, False].index(False)
        for place, mask in enumerate(masks):
            assert mask == answer.masks[count] or (place and not mask)
            token = answer.tokens[count]
            count += 1
            if token not in EOS:
                constraint.take(token)
            if count == len(answer.tokens) or [token] != draft[place : place + 1]:
                break
            if not masks[place + 1]:
                break
        assert constraint.state == ("open" if count < len(answer.tokens) else answer.state)


@pytest.mark.parametrize(
    ("name", "begun", "forced"),
    [
        ("json", '{"department":"front', " desk"),
        ("choice", "yes", ", "),
        ("free", "abc", ""),
        ("late", "a =", "> "),
        ("some tool", "", "<tool_call>"),
    ],
)
def test_forced_text(name: str, begun: str, forced: str) -> None:
    accepted = tokens(begun)
    constraint = constraint_of(ConstraintWish(1, SamplingParams(grammar=GRAMMARS[name]), accepted))
    before = mask_of(constraint)
    found, allowed = constraint.foresee([], 16)
    assert text(found) == forced  # and no token that what follows may join
    assert allowed == 0
    assert mask_of(constraint) == before
    masks = masks_of(constraint, found)
    assert all(token in mask for token, mask in zip(found, masks, strict=False))


def test_tokens_that_are_no_text_are_forced() -> None:
    accepted = tokens("call")
    wish = ConstraintWish(1, SamplingParams(grammar=GRAMMARS["special"]), accepted)
    forced = constraint_of(wish).foresee([], 16).forced
    assert forced[0] == 1
    assert text(forced[1:]) == "name: "


def test_ends_are_in_no_draft() -> None:
    wish = ConstraintWish(1, SamplingParams(grammar=GRAMMARS["free"]), ())
    assert constraint_of(wish).foresee([*tokens("a"), *EOS, 22], 3).allowed == 1


class Failing:
    """A matcher whose copies fail at the first token."""

    def __init__(self, real: LLMatcher, is_copy: bool = False) -> None:
        self._real, self._is_copy = real, is_copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def deep_copy(self) -> "Failing":
        return Failing(self._real.deep_copy(), is_copy=True)

    def consume_token(self, token_id: int) -> bool:
        if self._is_copy:
            raise RuntimeError("no more")
        done: bool = self._real.consume_token(token_id)
        return done


def test_a_copy_that_fails_ends_the_draft_alone() -> None:
    matcher = Failing(compiled(GRAMMARS["free"]).deep_copy())
    constraint = Constraint(matcher, TokenRules.of(SamplingParams(), EOS, VOCAB), 0)
    masks = masks_of(constraint, tokens("x") * 3)
    assert masks[0]
    assert masks[1:] == [[], [], []]
    assert constraint.take(tokens("x")[0]) == "open"
    assert mask_of(constraint)


def test_a_grammar_whose_lexer_fails_in_a_draft_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr(compile_module, "_OWN_LIMITS", limits)
    made = constraints()
    sampling = SamplingParams(grammar="start: /(a|b|c)*a(a|b|c){14}[0-9]+/")

    def new() -> Constraint:
        made.start(ConstraintWish(1, sampling, ()))
        while not (news := made.poll()):
            time.sleep(0)
        outcome = news[0].outcome
        assert isinstance(outcome, Constraint)
        return outcome

    first, draft = new(), tokens("abacabcabbacabcabacaabc")
    masks = np.zeros((1 + len(draft), WORDS), np.int32)
    made.fill([MaskWish(0, first, draft)], masks, math.inf)
    assert masks[0].any()
    assert not masks[-1].any()
    assert first.broken
    second = new()
    made.fill([MaskWish(0, second, [])], masks, math.inf)
    assert second.state == "open"
    assert len(made.take_compiled()) == 2
    made.close()


@pytest.mark.parametrize("words", [WORDS, WORDS + 3])
def test_cheap_masks_are_filled_together_as_alone(words: int) -> None:
    """Where a row is wider than the grammar's masks, each is filled by itself."""
    made: Constraints = constraints()
    sampling = SamplingParams(grammar=GRAMMARS["json"])
    answer = tokens('{"department":"front desk","urgent":true')
    alone, together = list[Constraint](), list[Constraint]()
    for found in (alone, together):
        for count in range(len(answer)):
            constraint = constraint_of(ConstraintWish(count, sampling, ()))
            for token_id in answer[:count]:
                constraint.note(token_id)
            found.append(constraint)
    masks = np.full((len(answer), words), -1, np.int32)
    for constraint in together:
        constraint.took(1e-5)
    assert made.fill([MaskWish(i, c, []) for i, c in enumerate(together)], masks, math.inf) == []
    for row, constraint in zip(masks, alone, strict=True):
        expected = np.full(words, -1, np.int32)
        constraint.fill(expected)
        assert (row == expected).all()
    assert {constraint.state for constraint in together} == {"open"}
    made.close()


@pytest.mark.parametrize("name", ["json", "any tool"])
def test_what_the_pool_fills_and_foresees(name: str) -> None:
    made: Constraints = constraints()
    sampling = SamplingParams(grammar=GRAMMARS[name])
    answer = tokens('{"department":"front desk","urgent":true')[:5]
    wishes = [
        MaskWish(i, constraint_of(ConstraintWish(i, sampling, ())), answer[:i]) for i in range(5)
    ]
    wishes.append(MaskWish(9, None, [5, 6]))
    masks = np.zeros((sum(wish.num_masks for wish in wishes), WORDS), np.int32)
    made.fill(wishes, masks, math.inf)
    expected = masks_of(constraint_of(ConstraintWish(1, sampling, ())), answer[:4])
    begin = 0
    for wish in wishes[:-1]:
        rows = [allowed_by(row) for row in masks[begin : begin + wish.num_masks]]
        assert rows == expected[: wish.num_masks]
        begin += wish.num_masks
    assert (masks[begin:] == -1).all()
    asked = [ForesightWish(w.constraint, answer, n) for n, w in enumerate(wishes) if w.constraint]
    found = made.foresee(asked, math.inf)
    assert [f.allowed for f in found] == [min(n, found[-1].allowed) for n in range(5)]
    made.close()


def test_a_draft_that_is_slow_to_fill_ends_and_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = constraints(mask_s=0.5)
    sampling = SamplingParams(grammar=GRAMMARS["free"])
    constraint = constraint_of(ConstraintWish(1, sampling, ()))
    masks = np.zeros((4, WORDS), np.int32)
    seconds = iter([0.0, 0.0, 0.1, 0.1, 0.2, 0.5, 0.8, 0.8])
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    made.fill([MaskWish(0, constraint, tokens("a") * 3)], masks, math.inf)
    assert [bool(row.any()) for row in masks] == [True, True, True, False]
    assert constraint.costly
    assert constraint.state == "open"
    made.close()


def test_text_that_takes_long_to_force_is_forced_once() -> None:
    made = constraints()
    grammar = 'start: "' + "ab" * 50000 + '" /[a-z]+/'
    matcher = compile_grammar(vocabulary(), grammar, ServedGrammarLimits())
    constraint = Constraint(matcher, TokenRules.of(SamplingParams(), EOS, VOCAB), 0)
    (found,) = made.foresee([ForesightWish(constraint, [], 8)], math.inf)
    assert len(found.forced) == 8
    assert constraint.costly
    made.close()


def test_a_late_mask_is_kept_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence's place draws nothing; the others' masks are there."""
    made, go_on = constraints(), threading.Event()
    sampling = SamplingParams(grammar=GRAMMARS["json"])
    slow, quick = (constraint_of(ConstraintWish(i, sampling, ())) for i in range(2))
    expected = masks_of(constraint_of(ConstraintWish(2, sampling, ())), [])[0]
    fill = Constraint.fill

    def filling(constraint: Constraint, row: np.ndarray) -> None:
        assert constraint is not slow or go_on.wait(TIMEOUT_S)
        fill(constraint, row)

    monkeypatch.setattr(Constraint, "fill", filling)
    wishes = [MaskWish(3, slow, []), MaskWish(5, quick, []), MaskWish(7, None, [])]
    row = np.zeros(WORDS, np.int32)
    quick.fill(row)
    quick.keep(row)
    masks, late = made.filled(wishes, memory, 0.01)
    assert late == [3]
    assert not masks[0].any()
    assert allowed_by(masks[1]) == expected
    assert (masks[2] == -1).all()
    if not slow.is_busy:  # its thread had not begun
        assert slow.is_late
        made.fill_aside(AsideWish(slow, ""))
    go_on.set()
    while slow.is_busy:
        assert not made.poll()
    assert slow.is_ready
    masks, late = made.filled(wishes[:1], memory, 0.0)
    assert (allowed_by(masks[0]), late) == (expected, [])
    made.close()


def test_masks_aside_and_tokens_that_are_costly_to_take() -> None:
    made = constraints()
    made.wait_for_vocabulary()
    sampling = SamplingParams(grammar=GRAMMARS["json"])
    answer = tokens('{"department":"front desk","urgent":true')
    made.start(ConstraintWish(1, sampling, answer[:3]))
    while not (news := made.poll()):
        time.sleep(0)
    constraint = news[0].outcome
    assert isinstance(constraint, Constraint)
    expected = masks_of(constraint_of(ConstraintWish(1, sampling, ())), answer)
    for number, token_id in enumerate(answer[3:], 3):
        assert constraint.is_ready
        masks, _ = made.filled([MaskWish(0, constraint, [])], memory, 0.0)
        assert allowed_by(masks[0]) == expected[number]
        constraint.mask_s = 1.0
        constraint.note(token_id)
        made.fill_aside(AsideWish(constraint, "a"))
        assert constraint.is_busy
        assert made.busy
        while constraint.is_busy:
            assert not made.poll()
    made.close()


def memory(count: int, words: int) -> np.ndarray:
    return np.zeros((count, words), np.int32)
