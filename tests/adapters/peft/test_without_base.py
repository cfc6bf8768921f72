"""What PEFT saves can be checked without the base, whatever the adapter has beside LoRA."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import judge_folder
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import SIZES, random_model

pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = {"task_type": "SEQ_CLS"}
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "every linear module": {"target_modules": "all-linear"},
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "DoRA": {"use_dora": True},
    "biases of B": {"lora_bias": True},
    "biases of the targets": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "an invocation": {"alora_invocation_tokens": [3]},
    "a head of its own": {"modules_to_save": ["lm_head"]},
    "tables of its own": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "rows of its own": {"trainable_token_indices": [3, 5]},
    "norms": {"modules_to_save": ["input_layernorm", "model.norm"]},
    "a score head": CLASSES,
    "a score head and norms": {**CLASSES, "modules_to_save": ["score", "input_layernorm"]},
    "a score head and an embedding": {**CLASSES, "modules_to_save": ["score", "embed_tokens"]},
    "a score head and all biases": {**CLASSES, "bias": "all"},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_it_is_accepted(feature: str, tmp_path: Path) -> None:
    settings = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **FEATURES[feature]}
    model = LlamaForSequenceClassification if "score" in feature else LlamaForCausalLM
    config: Any = LoraConfig(**settings)
    base = random_model(VARIANTS["llama3"].config, model, **SIZES, attention_bias=True)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    judged = judge_folder(tmp_path / "adapter")
    assert judged.manifest.ranks == (4,)


def test_a_score_head_must_fit_an_embedding(tmp_path: Path) -> None:
    settings: Any = {**CLASSES, "r": 4, "target_modules": ["q_proj"]}
    config = LoraConfig(**settings, modules_to_save=["score", "embed_tokens"])
    model = random_model(VARIANTS["llama3"].config, LlamaForSequenceClassification, **SIZES)
    made: Any = get_peft_model(model, config)
    score = made.base_model.model.score.modules_to_save["default"]
    score.weight.data = score.weight.data[:, 1:].contiguous()
    made.save_pretrained(tmp_path / "adapter")
    with pytest.raises(AdapterError, match="labels of 64 numbers each"):
        judge_folder(tmp_path / "adapter")
