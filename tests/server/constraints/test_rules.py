"""Masks against sets of tokens."""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.constraints.rules import TokenRules, mask_words
from loraplex.server.protocol import SamplingParams

VOCAB = 70  # of three words, the last not full
ids = st.integers(0, VOCAB - 1)


def tokens_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def mask_of(tokens: set[int]) -> np.ndarray:
    bits = np.zeros(32 * mask_words(VOCAB), dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Case(NamedTuple):
    drawable: set[int]
    eos: set[int]
    sampling: SamplingParams
    output: list[int]
    may_end: bool


few = st.integers(0, 4)
cases = st.builds(
    Case,
    drawable=st.sets(ids),
    eos=st.sets(ids, max_size=3),
    sampling=st.builds(
        SamplingParams,
        stop_token_ids=st.lists(ids, max_size=2).map(tuple),
        end_token_ids=st.lists(ids, max_size=2).map(tuple),
        ignore_eos=st.booleans(),
        allowed_token_ids=st.lists(ids, max_size=30).map(tuple),
        bad_words=st.lists(st.lists(few, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    ),
    output=st.lists(few, max_size=5),
    may_end=st.booleans(),
)


@given(cases)
def test_a_mask_is_what_the_request_says(case: Case) -> None:
    sampling, output = case.sampling, tuple(case.output)
    rules = TokenRules.of(sampling, case.eos, VOCAB)
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends |= case.eos | set(sampling.end_token_ids)
    expected = case.drawable | ends if case.may_end else case.drawable - ends
    if sampling.allowed_token_ids:
        expected &= ends | set(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        if output[max(0, len(output) - len(word) + 1) :] == word[:-1]:
            expected -= {word[-1]}
    row = mask_of(case.drawable)
    rules.apply(row, case.may_end, output[max(0, len(output) - rules.memory) :])
    assert rules.ends == ends
    assert tokens_of(row) == expected


def test_a_mask_of_all_tokens_has_no_others() -> None:
    row = mask_of(set())
    TokenRules.of(SamplingParams(), (), VOCAB).allow_all(row)
    assert tokens_of(row) == set(range(VOCAB))
