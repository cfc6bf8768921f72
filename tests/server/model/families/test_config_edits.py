"""No edit of a config.json is silently wrong: it is refused, or computed as transformers does."""

import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from loraplex.server.config import ConfigError
from loraplex.server.model.checkpoint.checkpoint import CheckpointError
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.config_edits import Edit, edits
from tests.server.model.families.parity import TOLERANCE, rounding
from tests.server.model.families.variants import VARIANTS, rows
from tests.server.model.hub_models import make_model, random_model, reference_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT_TOKENS = 14
# Of each family in an ordinary run; `make test-all` tries every edit.
SAMPLED = 2
MOST_PARAMETERS = 10_000_000
EAGER = {"attn_implementation": "eager"}


# Where text_config contradicts what stands beside it, or says what the larger model leaves out.
CONTRADICTED = {
    "gemma3-images": "tie_word_embeddings beside text_config's, final_logit_softcapping in it",
    "idefics3": "tie_word_embeddings in text_config",
    "mistral3": "tie_word_embeddings in text_config",
    "mistral3-ministral3": "tie_word_embeddings in text_config",
    "qwen3-vl": "tie_word_embeddings in text_config alone",
    "smolvlm": "tie_word_embeddings in text_config",
}
EVERY = [
    pytest.param(name, marks=pytest.mark.xfail(reason=CONTRADICTED[name], strict=True))
    if name in CONTRADICTED
    else name
    for name in VARIANTS
]


@cache
def written(name: str) -> dict[str, Any]:
    """A variant's config.json."""
    config: dict[str, Any] = json.loads(make_model(name).config.to_json_string())
    return config


def oracle(name: str, folder: Path) -> PreTrainedModel | None:
    """transformers' model of the folder's config.json, and its weights there. None where
    transformers refuses it, or where a default size makes it large."""
    row = VARIANTS[name]
    try:
        made = AutoConfig.from_pretrained(folder, **EAGER)
        if getattr(made, "alibi", False):  # Falcon's eager attention adds slopes twice
            made._attn_implementation = "sdpa"
        # A Mistral with `layer_types` becomes a Ministral.
        is_usual = made.model_type == written(name)["model_type"]
        build: Any = row.model if is_usual else AutoModelForCausalLM.from_config
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in build(made).parameters())
        if size > MOST_PARAMETERS:
            return None
        model = random_model(lambda: made, build)
        save_weights(model, folder)
        return model
    except Exception:
        return None


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Beside them stands a config.json that means nothing, to be written over."""
    made, model.config = model.config, type(model.config)()
    generation: Any = GenerationConfig
    model.generation_config = generation()
    model.save_pretrained(folder)
    model.config = made


def difference(folder: Path, model: PreTrainedModel) -> float:
    """Largest error of a log-probability beyond what float32 allows; 0 = refused, or computed by
    neither. folder: with the edited config.json and the model's weights."""
    try:
        driver = Driver(folder)
    except (CheckpointError, ConfigError):
        return 0.0
    stream = Stream(driver, 0, list(range(3, 3 + PROMPT_TOKENS)))
    generate(driver, [stream], 3, 5)
    driver.close()
    try:
        expected = reference_logprobs(model, None, stream.tokens)
        allowed = TOLERANCE + 10 * rounding(model, None, stream.tokens, expected)
    except Exception:  # transformers accepts it, and cannot run it
        return 0.0
    worst = max(
        distance(expected[place], found.top)
        for place, found in enumerate(stream.logprobs, PROMPT_TOKENS - 1)
    )
    return worst if worst > allowed else 0.0


def distance(expected: torch.Tensor, top: Sequence[tuple[int, float]]) -> float:
    """Infinite where one of them is no number, and the other is."""
    got = torch.full_like(expected, float("nan"))
    got[[token for token, _ in top]] = torch.tensor([value for _, value in top])
    same = torch.isnan(got) & torch.isnan(expected)
    off = (got - expected).abs().nan_to_num(float("inf"))
    return float(off.masked_fill(same, 0.0).max())


def silently_wrong(name: str, tried: Iterable[Edit], folder: Path) -> list[str]:
    wrong = []
    for edit in tried:
        text = json.dumps(edit.config)
        (folder / "config.json").write_text(text)
        model = oracle(name, folder)
        if model is None:
            continue
        (folder / "config.json").write_text(text)
        off = difference(folder, model)
        if off:
            wrong.append(f"{edit.name}: off by {off:.3g}")
    return wrong


@pytest.mark.parametrize("name", rows(name for name in VARIANTS if name not in CONTRADICTED))
def test_a_sample_of_edits(name: str, tmp_path: Path) -> None:
    tried = random.Random(name).sample(list(edits(written(name))), SAMPLED)
    assert silently_wrong(name, tried, tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERY)
def test_every_edit(name: str, tmp_path: Path) -> None:
    tried = list(edits(written(name)))
    assert len(tried) > 100
    assert silently_wrong(name, tried, tmp_path) == []
