"""Processed log-probabilities: those of the distribution that each token was drawn from."""

from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from loraplex.server.protocol import SamplingParams, TokenLogprob
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate, step
from tests.server.model.hub_models import VOCAB, make_model, save_model
from tests.server.model.sampling import test_sampling as bench
from tests.server.model.sampling.test_sampling import CASES, Bench, oracle, random_logits, start

ASKED = {"logprobs": EVERY_LOGPROB, "processed_logprobs": True}


@settings(max_examples=60)
@given(
    params=st.builds(
        SamplingParams,
        temperature=st.just(0.0) | st.floats(0.2, 3.0),
        top_k=st.integers(0, 70),
        top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.5]),
        typical_p=st.sampled_from([0.2, 0.7, 1.0]),
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, -0.5, 1.5]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        logit_bias=st.dictionaries(st.integers(0, bench.VOCAB - 1), st.floats(-20, 20), max_size=4),
    ),
    seed=st.integers(0, 10_000),
    allowed=st.none() | st.sets(st.integers(0, bench.VOCAB - 1), min_size=1),
)
def test_the_draw_uses_what_transformers_computes(
    params: SamplingParams, seed: int, allowed: set[int] | None
) -> None:
    ids = None if allowed is None else sorted(allowed)
    logits = random_logits(1, seed)
    expected = oracle(params, logits, allowed=ids).double().log_softmax(-1)
    rows = Bench([start(row, params, seed=row) for row in range(8)])
    found = rows.sample(logits.expand(8, -1), range(8), [ids] * 8)
    scores = found.logits.log_softmax(-1)
    torch.testing.assert_close(scores.double(), expected.expand(8, -1), rtol=1e-5, atol=2e-5)
    assert scores.gather(1, found.token_ids[:, None]).isfinite().all()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama3")


@pytest.fixture(scope="module")
def driver(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    found = Driver(save_model(model, tmp_path_factory.mktemp("base")))
    yield found
    found.close()


EACH = [
    *CASES.values(),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, top_k=3),
    SamplingParams(temperature=0.7, frequency_penalty=0.8, presence_penalty=0.3),
]


def few(tokens: Sequence[int]) -> list[int]:
    return [3 + (tokens[-1] * 7 + 5 * i) % 90 for i in range(9)]


def wanted(model: PreTrainedModel, stream: Stream, place: int) -> torch.Tensor:
    """Log-probabilities of one token of the answer, from transformers: float64 `[vocab]`."""
    tokens, params = stream.tokens[:place], stream.sampling
    bias = {i: b for i, b in params.logit_bias.items() if i < VOCAB}
    params = msgspec.structs.replace(params, logit_bias=bias)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[:, -1]
    allowed = None if stream.allowed is None else stream.allowed(tokens)
    scores = oracle(params, logits, 0, allowed, tokens, stream.prompt_len)
    return scores.double().log_softmax(-1)


def check(model: PreTrainedModel, stream: Stream) -> None:
    assert len(stream.logprobs) == len(stream.output) > 3
    for place, found in enumerate(stream.logprobs, stream.prompt_len):
        expected = wanted(model, stream, place)
        ours = torch.full((VOCAB,), torch.nan, dtype=torch.double)
        for token, value in found.top:
            ours[token] = value
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-4)


@pytest.mark.parametrize("is_bound", [False, True])
def test_every_row_of_a_step_has_its_own(
    driver: Driver, model: PreTrainedModel, is_bound: bool
) -> None:
    """Beside rows with raw logprobs, and with none; of prompts in chunks and of decodes."""
    streams = []
    for row, params in enumerate(EACH):
        kind = ASKED if row % 3 else {"logprobs": EVERY_LOGPROB}
        sampling = msgspec.structs.replace(params, **kind)
        ids = [3 + (7 * row + 11 * i) % (VOCAB - 3) for i in range(3 + row % 5)]
        stream = Stream(driver, row, ids, sampling=sampling, seed=row)
        streams.append(stream.bound(few if is_bound else None))
    plain = Stream(driver, len(EACH), [5, 6], sampling=SamplingParams(), seed=9)
    generate(driver, [*streams, plain], 6, 4)
    for row, stream in enumerate(streams):
        if row % 3:
            check(model, stream)
        else:
            with torch.no_grad():
                raw = model(torch.tensor([stream.tokens])).logits[0].log_softmax(-1)
            for place, found in enumerate(stream.logprobs, stream.prompt_len):
                assert found.logprob == pytest.approx(
                    float(raw[place - 1, found.token_id]), abs=1e-4
                )
    for stream in (*streams, plain):
        stream.free()


def test_the_mode_changes_no_draw(driver: Driver) -> None:
    outputs = []
    for processed in (False, True):
        asked = {"logprobs": 1, "processed_logprobs": processed}
        streams = [
            Stream(
                *(driver, row, [3, 4 + row]),
                sampling=msgspec.structs.replace(params, **asked),
                seed=row,
            )
            for row, params in enumerate(EACH)
        ]
        generate(driver, streams, 6, 64)
        outputs.append([stream.output for stream in streams])
        for stream in streams:
            stream.free()
    assert outputs[0] == outputs[1]


def test_logprobs_of_the_prompt_stay_raw(driver: Driver) -> None:
    def scored(processed: bool) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
        sampling = SamplingParams(
            temperature=3.0, logprobs=0, prompt_logprobs=2, processed_logprobs=processed
        )
        stream = Stream(driver, 0, [9, 8, 7, 6], sampling=sampling)
        step(driver, [(stream, 64)])
        stream.free()
        return stream.prompt_logprobs, stream.logprobs

    (raw, first), (same, other) = scored(False), scored(True)
    assert raw == same
    assert first[0].logprob != other[0].logprob
