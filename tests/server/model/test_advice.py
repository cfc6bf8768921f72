"""Advice of generation_config.json holds where it holds in transformers' `generate`."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from loraplex.server.model.card import Advice, read_advice
from loraplex.server.protocol import SamplingParams
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.hub_models import VOCAB, make_model, save_model

CONTEXT = 256
EOS = [2, 5, 11]
NEVER = -1e6
PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def advice(**generation: Any) -> Advice:
    return read_advice(json.loads(json.dumps(generation)), VOCAB, CONTEXT)


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {}),
        ({"do_sample": False, "temperature": 0.6, "min_p": 0.1, "typical_p": 0.9}, {}),
        ({"do_sample": None, "top_k": 5, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"temperature": "hot", "top_p": -3}, {}),  # what does not hold need not be sound
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0, "min_p": 0.1},
        ),
        ({"do_sample": True, "top_k": -1, "typical_p": 0.5}, {"top_k": 0.0, "typical_p": 0.5}),
        ({"do_sample": True, "top_k": None, "max_length": 4096}, {}),
        (
            {"min_new_tokens": 3, "max_new_tokens": 40, "min_length": 9},
            {"min_tokens": 3.0, "max_tokens": 40.0},
        ),
    ],
)
def test_defaults(generation: dict[str, Any], defaults: dict[str, float]) -> None:
    assert advice(**generation).defaults == defaults


@pytest.mark.parametrize(
    ("ids", "found"),
    [(None, ()), ([], ()), ([9, 3, 9], (3, 9)), ([-1, VOCAB, 4], (4,)), (list(range(VOCAB)), None)],
)
def test_suppressed(ids: Any, found: tuple[int, ...] | None) -> None:
    assert advice(suppress_tokens=ids).suppressed == (
        tuple(range(VOCAB)) if found is None else found
    )


@pytest.mark.parametrize(
    "generation",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": "1.5"},
        {"repetition_penalty": True},
        {"do_sample": True, "top_p": 0},
        {"do_sample": True, "temperature": -1},
        {"do_sample": True, "min_p": [0.1]},
        {"min_new_tokens": -1},
        {"min_new_tokens": 2.5},
        {"max_new_tokens": 0},
        {"max_new_tokens": 10**20},
        {"suppress_tokens": 7},
        {"suppress_tokens": ["7"]},
    ],
)
def test_what_nothing_could_be_drawn_by_is_refused(generation: dict[str, Any]) -> None:
    (name,) = generation.keys() - {"do_sample"}
    with pytest.raises(ValueError, match=name):
        advice(**generation)


# Values that ask for something, of everything that can change the tokens.
ASKING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.2,
    "top_h": 0.4,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[7]],
    "sequence_bias": [[[7], -1.0]],
    "guidance_scale": 2.0,
    "min_length": 9,
    "min_new_tokens": 9,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": [5, 1.1],
    "suppress_tokens": [7],
    "begin_suppress_tokens": [7],
    "num_beams": 2,
    "watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0, "seeding_scheme": "selfhash"},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama3")


def changes_tokens(model: Any, generation: dict[str, Any]) -> bool:
    """Whether transformers' `generate` would do anything by it that it does not do anyway."""
    config: Any = GenerationConfig(**generation, max_length=50)  # type: ignore[no-untyped-call]
    config._eos_token_tensor = torch.tensor(EOS)
    inputs = torch.tensor([[5, 6, 7]])
    mask = {"attention_mask": torch.ones_like(inputs)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processors = model._get_logits_processor(config, 3, inputs, model_kwargs=mask, device="cpu")
    return bool(processors) or config.get_generation_mode() not in PLAIN_MODES


@pytest.mark.parametrize("do_sample", [True, False, None])
@pytest.mark.parametrize("name", ASKING)
def test_nothing_that_generate_follows_is_dropped_in_silence(
    model: PreTrainedModel, name: str, do_sample: bool | None
) -> None:
    """It is followed here, too, or told of; what `generate` leaves alone is not followed."""
    generation = {name: ASKING[name], "do_sample": do_sample}
    found = advice(**generation)
    told = any(name in remark and "not followed" in remark for remark in found.remarks)
    followed = bool(found.defaults or found.suppressed)
    assert changes_tokens(model, generation) == (followed or told)
    assert not (followed and told)
    if not (followed or told):
        assert any(name in remark and "do_sample" in remark for remark in found.remarks) or (
            name in ("top_h", "epsilon_cutoff", "eta_cutoff")
        )


NEUTRAL = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "length_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "forced_eos_token_id"), None),
    "early_stopping": False,
    "use_cache": True,
    "renormalize_logits": False,
    "max_length": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "transformers_version": "4.40.0",
    "do_sample": True,
}


def test_what_asks_for_nothing_is_not_told_of() -> None:
    assert advice(**NEUTRAL).remarks == ()
    assert advice(max_length=20).remarks != ()
    assert advice(max_length=20, max_new_tokens=9).remarks == ()
    assert advice(penalty_alpha=0.6).remarks == ()
    assert "penalty_alpha" in advice(penalty_alpha=0.6, top_k=4).remarks[0]


@pytest.mark.parametrize(
    "generation",
    [
        {},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7, "temperature": 0.3, "top_k": 1, "top_p": 0.1},
        {"suppress_tokens": list(range(0, VOCAB, 2))},
        {"min_new_tokens": 12, "eos_token_id": list(range(60))},
        {"max_new_tokens": 5},
        {
            "repetition_penalty": 1.3,
            "suppress_tokens": [3, 4, 7, -1],
            "min_new_tokens": 6,
            "eos_token_id": list(range(30, 80)),
            "max_new_tokens": 17,
        },
    ],
)
def test_greedy_answers_are_those_of_generate(
    model: PreTrainedModel, tmp_path: Path, generation: dict[str, Any]
) -> None:
    """The folder's own generation_config.json, read by both."""
    eos = generation.get("eos_token_id", EOS)
    folder = save_model(model, tmp_path / "model")
    content = {"eos_token_id": eos, **generation}
    (folder / "generation_config.json").write_text(json.dumps(content))
    found = read_advice(content, VOCAB, CONTEXT)
    limit = {} if "max_new_tokens" in generation else {"max_new_tokens": 20}
    theirs: Any = type(model).from_pretrained(folder)
    defaults = dict(found.defaults)
    tokens = int(defaults.pop("max_tokens", 20))
    least = int(defaults.pop("min_tokens", 0))
    sampling = SamplingParams(
        temperature=0.0,
        end_token_ids=tuple(eos),
        logit_bias=dict.fromkeys(found.suppressed, NEVER),
        **defaults,  # type: ignore[arg-type]
    )
    driver = Driver(folder)
    try:
        for seed in range(4):
            prompt = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(seed))
            expected = theirs.generate(prompt[None], **limit)[0, 9:].tolist()
            stream = Stream(
                *(driver, 0, prompt.tolist()), sampling=sampling, suppressed_until=least
            )
            generate(driver, [stream], tokens, 64)
            stream.free()
            last = [i for i, t in enumerate(stream.output) if i >= least and t in eos]
            assert stream.output[: last[0] + 1 if last else None] == expected
    finally:
        driver.close()
