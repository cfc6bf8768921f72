"""LoRA configurations that between them use every feature which changes the maths."""

from collections.abc import Callable

from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from tests.server.model.hub_models import add_adapter

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ZOO: dict[str, Callable[[], LoraConfig]] = {
    "rank1": lambda: LoraConfig(r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"]),
    "rank3_rslora": lambda: LoraConfig(r=3, lora_alpha=4, target_modules=SEVEN, use_rslora=True),
    "rank8_one_layer": lambda: LoraConfig(
        r=8,
        lora_alpha=6,
        target_modules=["k_proj", "gate_proj", "down_proj"],
        layers_to_transform=[1],
    ),
    "rank16": lambda: LoraConfig(r=16, lora_alpha=16, target_modules=SEVEN),
    "rank24_patterns": lambda: LoraConfig(
        r=24,
        lora_alpha=12,
        target_modules=SEVEN,
        rank_pattern={"q_proj": 5, r"layers\.0\.mlp\.down_proj": 2},
        alpha_pattern={"up_proj": 3, r"layers\.2\.self_attn\.o_proj": 40},
    ),
    "rank64_everything": lambda: LoraConfig(
        r=64, lora_alpha=16, target_modules=[*SEVEN, "embed_tokens", "lm_head"]
    ),
    "fan_in_fan_out": lambda: LoraConfig(
        r=4, lora_alpha=4, target_modules=["up_proj", "o_proj"], fan_in_fan_out=True
    ),
    "missing_layers": lambda: LoraConfig(
        r=2, lora_alpha=5, target_modules=["v_proj", "up_proj"], layers_to_transform=[0, 2]
    ),
    "embed_only": lambda: LoraConfig(r=6, lora_alpha=6, target_modules=["embed_tokens"]),
    "head_only": lambda: LoraConfig(r=7, lora_alpha=9, target_modules=["lm_head"]),
}


def with_zoo(model: PreTrainedModel) -> PeftModel:
    wrapped: PreTrainedModel | PeftModel = model
    for seed, (name, config) in enumerate(ZOO.items()):
        wrapped = add_adapter(wrapped, name, config(), seed)
    assert isinstance(wrapped, PeftModel)
    return wrapped
