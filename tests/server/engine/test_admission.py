"""Every value that a decoded request can hold is taken or refused by name, never a crash."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.engine.admission import refuse
from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.protocol import GenerateRequest, SamplingParams, VectorParams
from tests.server.engine.harness import LIMITS, Harness, limits, make_request

NAN, INF = math.nan, math.inf
HUGE = 2**62


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_ids", []),
        ("prompt_ids", [-1]),
        ("prompt_ids", [100]),
        ("prompt_ids", [5, HUGE]),
        ("accepted_ids", [100]),
        ("accepted_ids", [5] * 5),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (5,) * 257),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: NAN}),
        ("logit_bias", {5: INF}),
        ("logit_bias", {5: 1.0, 6: 1e39}),
        ("logit_bias", {5: -1e39}),
        ("allowed_token_ids", (5, 100)),
        ("logprob_token_ids", (5, 100)),
        ("logprob_token_ids", (5,) * 129),
        ("bad_words", ((5, 100),)),
        ("bad_words", ((5,), ())),
        ("bad_words", ((5,) * 129,)),
        ("bad_words", ((5,),) * 1025),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_k", -1),
        ("top_k", HUGE),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", NAN),
        ("typical_p", 0.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-40),
        ("frequency_penalty", INF),
        ("presence_penalty", NAN),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", HUGE),
        ("vector", VectorParams("logits")),
        ("vector", VectorParams("hidden", token_ids=(5,))),
        ("vector", VectorParams("logits", token_ids=(5, 100))),
        ("vector", VectorParams("logits", token_ids=(5,) * 65)),
        ("vector", VectorParams("logits", "mean", (5,))),
        ("vector", VectorParams("scores")),
        ("vector", VectorParams()),
        ("logprobs", -1),
        ("logprobs", (1 << 16) + 1),
        ("prompt_logprobs", -1),
        ("adapter", ""),
        ("choice", -1),
        ("choice", HUGE),
        ("deadline_s", NAN),
    ],
)
def test_refused_by_name(field: str, value: Any) -> None:
    refusal = refuse(make_request(**{"prompt": [5], field: value}), LIMITS)
    assert refusal is not None
    assert refusal.code == "invalid_request"
    assert field in refusal.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": LIMITS.vocab_size},
        {"vocab_size": LIMITS.most_ids + 1},
        {"vocab_size": -1},
        {"vocab_size": LIMITS.vocab_size + 1, "adapter": None},
        {"vocab_size": LIMITS.vocab_size + 1, "adapter_from": None},
        {"vocab_size": LIMITS.vocab_size + 1, "adapter_from": 1},
    ],
)
def test_new_ids_are_of_an_adapter_that_acts_on_all_tokens(wrong: dict[str, Any]) -> None:
    refusal = refuse(make_request([5, 6], **({"adapter": "a"} | wrong)), LIMITS)
    assert refusal is not None
    assert "vocab_size" in refusal.message


def test_ids_of_a_request_lie_below_those_of_its_adapter() -> None:
    new, size = LIMITS.vocab_size, LIMITS.vocab_size + 3
    for ids in ({"prompt": [5, new]}, {"prompt": [5], "stop_token_ids": (new + 2,)}):
        assert refuse(make_request(**ids, adapter="a", vocab_size=size), LIMITS) is None
        assert refuse(make_request(**ids, adapter="a"), LIMITS) is not None
    assert refuse(make_request([5, size], adapter="a", vocab_size=size), LIMITS) is not None


def test_a_sequence_starts_only_if_its_adapter_has_the_ids() -> None:
    """At a load, and when the adapter is there already."""
    harness, size = Harness(LIMITS), LIMITS.vocab_size + 3
    harness.table_sizes["a"] = size
    found = []
    for adapter, claimed in [
        *(("a", size), ("narrow", size), ("narrow", size)),
        *(("a", size), ("a", size + 1), ("b", size), ("a", size)),
    ]:
        request = make_request([5, size - 1], 3, adapter, vocab_size=claimed)
        key = harness.submit(request)
        harness.run()
        found.append(harness.events[key][-1].finish)
    assert found == ["length", "error", "error", "length", "error", "error", "length"]


def test_a_grammar_says_where_the_output_ends() -> None:
    refusal = refuse(make_request([5], grammar='start: "a"', ignore_eos=True), LIMITS)
    assert refusal is not None
    assert "ignore_eos" in refusal.message


def test_too_many_biases_and_prompt_logprobs() -> None:
    wide = limits(vocab_size=10_000, max_context=10_000, num_pages=4000)
    biases = refuse(make_request([5], logit_bias=dict.fromkeys(range(2049), 1.0)), wide)
    assert biases is not None
    assert "logit_bias" in biases.message
    for many in ({"prompt_logprobs": 128}, {"prompt_logprobs": 0, "logprob_token_ids": (5,) * 64}):
        scored = refuse(make_request([5] * 9000, **many), wide)
        assert scored is not None
        assert "prompt_logprobs" in scored.message


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "changes", "refused"),
    [
        (63, 1, {}, False),
        (64, 1, {}, True),
        (64, 0, {}, False),
        (65, 0, {}, True),
        (10, 10**6, {}, False),
        (10, 39, {"num_pages": 12}, False),
        (10, 40, {"num_pages": 12}, True),
    ],
)
def test_what_can_never_fit(
    prompt_len: int, max_tokens: int, changes: dict[str, int], refused: bool
) -> None:
    refusal = refuse(make_request([5] * prompt_len, max_tokens), limits(**changes))
    assert (refusal is not None) == refused
    assert refusal is None or refusal.code == "context_length"


def test_the_largest_request_that_is_taken_does_finish() -> None:
    harness = Harness(limits(num_pages=12), depth=2)
    key = harness.submit(make_request([5] * 10, 39))
    harness.run()
    assert harness.last(key).finish == "length"
    assert len(harness.tokens(key)) == 39
    harness.assert_at_rest()


NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 5, 64, 2**31, 2**63, -(2**63)]), st.integers(-5, 200)
)
FLOATS = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 0.5]))
REQUESTS = st.builds(
    GenerateRequest,
    request_id=st.text(max_size=3),
    attempt=NUMBERS,
    choice=NUMBERS,
    adapter=st.sampled_from([None, "", "a", "\x00"]),
    prompt_ids=st.lists(NUMBERS, max_size=4),
    accepted_ids=st.lists(NUMBERS, max_size=2),
    sampling=st.builds(
        SamplingParams,
        temperature=FLOATS,
        top_k=NUMBERS,
        top_p=FLOATS,
        repetition_penalty=FLOATS,
        max_tokens=NUMBERS,
        min_tokens=NUMBERS,
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(NUMBERS, max_size=2).map(tuple),
        logit_bias=st.dictionaries(NUMBERS, FLOATS, max_size=2),
        logprobs=st.none() | NUMBERS,
        prompt_logprobs=st.none() | NUMBERS,
        allowed_token_ids=st.lists(NUMBERS, max_size=3).map(tuple),
        bad_words=st.lists(st.lists(NUMBERS, max_size=2).map(tuple), max_size=2).map(tuple),
    ),
    seed=NUMBERS,
    priority=NUMBERS,
    deadline_s=st.none() | FLOATS,
    salt=st.text(max_size=2),
)


@settings(max_examples=300)
@given(request=REQUESTS)
def test_any_request_ends_in_one_terminal_event(request: GenerateRequest) -> None:
    harness = Harness(depth=2)
    neighbour = harness.submit(make_request([5, 6], 8))
    key = harness.submit(request)
    harness.run()
    assert harness.last(key).finish is not None
    assert harness.last(neighbour).finish == "length"
    harness.assert_at_rest()


def test_limits_are_plain_values() -> None:
    assert msgspec.json.decode(msgspec.json.encode(LIMITS), type=ExecutorLimits) == LIMITS
