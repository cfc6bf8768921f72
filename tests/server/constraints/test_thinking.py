"""Reasoning ends after so many tokens: read from an output, and kept to by masks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.constraints.constraint import Constraint, Thinking
from loraplex.server.constraints.rules import mask_words
from loraplex.server.constraints.wishes import ConstraintWish, MaskWish
from loraplex.server.protocol import SamplingParams, ThinkingBudget
from tests.server.constraints.grammar_harness import constraint_of
from tests.server.constraints.serving import EOS, VOCAB, constraints, tokens
from tests.server.constraints.test_drafts import mask_of, masks_of

OPENS, CLOSES = (7, 8), (10, 11, 10, 12)


def forced(budget: ThinkingBudget, output: list[int]) -> list[int]:
    """What may come next: [] = anything."""
    constraint = constraint_of(ConstraintWish(1, SamplingParams(thinking=budget), output))
    mask = mask_of(constraint)
    return [] if len(mask) == VOCAB else mask


@pytest.mark.parametrize(
    ("tokens", "opens", "output", "expected"),
    [
        (2, (), [], []),
        (2, (), [20], []),
        (2, (), [20, 21], [10]),
        (2, (), [20, 21, 10], [11]),
        (2, (), [20, 21, 10, 11, 10], [12]),
        (2, (), [20, 21, 10, 11, 10, 12], []),
        (2, (), [20, 21, 10, 11, 10, 12, *range(30, 60)], []),
        (0, (), [], [10]),
        (3, (), [10, 11, 10, 12, 30, 31], []),  # it ended before
        (3, (), [20, 10, 11], [10]),  # its end has begun
        (4, (), [10, 11, 10, 11], [10]),
        (2, OPENS, [20, 21, 22], []),  # no reasoning
        (2, OPENS, [7, 8], []),
        (2, OPENS, [7, 8, 20], []),
        (2, OPENS, [7, 8, 20, 21], [10]),
        (0, OPENS, [7], []),
        (0, OPENS, [7, 8], [10]),
    ],
)
def test_what_is_forced(
    tokens: int, opens: tuple[int, ...], output: list[int], expected: list[int]
) -> None:
    assert forced(ThinkingBudget(tokens, opens, CLOSES), output) == expected


@given(st.integers(0, 12), st.lists(st.sampled_from([7, 8, 10, 11, 12, 20]), max_size=30))
def test_reasoning_ends_in_time_whatever_is_drawn(most: int, drawn: list[int]) -> None:
    thinking, output = Thinking(ThinkingBudget(most, (), CLOSES)), list[int]()
    for token in drawn:
        mask = np.full(1, -1, np.int32)
        thinking.forbid(mask)
        allowed = [i for i in range(32) if int(mask[0]) >> i & 1]
        output.append(token if token in allowed else allowed[0])
        assert not thinking.take(output[-1])
    places = [i for i in range(len(output)) if tuple(output[i : i + 4]) == CLOSES]
    assert places or len(output) < most + len(CLOSES)
    assert all(place <= most for place in places[:1])


def test_a_token_that_may_not_come_is_not_forced() -> None:
    budget = ThinkingBudget(0, (), (10,))
    sampling = SamplingParams(thinking=budget, allowed_token_ids=(3, 4))
    assert mask_of(constraint_of(ConstraintWish(1, sampling, ()))) == [*EOS, 3, 4]


def test_drafts_and_a_grammar() -> None:
    """The masks behind a draft's tokens are those without it."""
    grammar = 'start: /(?s:.*)/ "</t>" ("yes" | "no")'
    sampling = SamplingParams(
        grammar=grammar, thinking=ThinkingBudget(2, (), tuple(tokens("</t>")))
    )
    constraint = constraint_of(ConstraintWish(1, sampling, ()))
    answer = [*tokens("a")[:1], *tokens("b")[:1], *tokens("</t>"), *tokens("yes")]
    found = masks_of(constraint, answer[:-1])
    plain = constraint_of(ConstraintWish(1, sampling, ()))
    for token, mask in zip(answer, found, strict=True):
        assert mask_of(plain) == mask
        assert token in mask
        plain.take(token)
    assert [len(mask) == 1 for mask in found[2:-1]] == [True] * len(tokens("</t>"))
    fresh = constraint_of(ConstraintWish(1, sampling, ()))
    assert fresh.foresee(answer[:2] + tokens("c"), 9).allowed == 2


def test_an_answer_that_is_resumed_keeps_its_count() -> None:
    made = constraints()
    made.start(ConstraintWish(1, SamplingParams(thinking=ThinkingBudget(3, (), (10,))), (20, 21)))
    while not (news := made.poll()):
        pass
    constraint = news[0].outcome
    assert isinstance(constraint, Constraint)
    mask = np.zeros((1, mask_words(VOCAB)), np.int32)
    made.fill([MaskWish(0, constraint, [])], mask, math.inf)
    assert np.unpackbits(mask.view(np.uint8)).sum() == VOCAB
    constraint.take(22)
    made.fill([MaskWish(0, constraint, [])], mask, math.inf)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [10]
    made.close()
