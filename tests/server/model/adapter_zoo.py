"""LoRA configurations that between them use every feature which changes the maths."""

from collections.abc import Callable, Mapping, Sequence

from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from tests.server.model.families.variants import SEVEN, Variant
from tests.server.model.hub_models import add_adapter

# Of the names of a layer's modules.
ZOO: dict[str, Callable[[Sequence[str]], LoraConfig]] = {
    "rank1": lambda names: LoraConfig(r=1, lora_alpha=2, target_modules=[names[0], names[2]]),
    "rank3_rslora": lambda names: LoraConfig(
        r=3, lora_alpha=4, target_modules=[*names], use_rslora=True
    ),
    "rank8_one_layer": lambda names: LoraConfig(
        r=8,
        lora_alpha=6,
        target_modules=[*names[1::3], names[-1]],
        layers_to_transform=[1],
    ),
    "rank16": lambda names: LoraConfig(r=16, lora_alpha=16, target_modules=[*names]),
    "rank24_patterns": lambda names: LoraConfig(
        r=24,
        lora_alpha=12,
        target_modules=[*names],
        rank_pattern={names[0]: 5, rf"layers\.0\.\w+\.{names[-1]}": 2},
        alpha_pattern={names[-2]: 3, r"layers\.2\.self_attn\.o_proj": 40},
    ),
    "rank64_everything": lambda names: LoraConfig(
        r=64, lora_alpha=16, target_modules=[*names, "embed_tokens", "lm_head"]
    ),
    "fan_in_fan_out": lambda names: LoraConfig(
        r=4, lora_alpha=4, target_modules=[names[-3], names[-2]], fan_in_fan_out=True
    ),
    "missing_layers": lambda names: LoraConfig(
        r=2, lora_alpha=5, target_modules=[names[2], names[-2]], layers_to_transform=[0, 2]
    ),
    "embed_only": lambda _: LoraConfig(r=6, lora_alpha=6, target_modules=["embed_tokens"]),
    "head_only": lambda _: LoraConfig(r=7, lora_alpha=9, target_modules=["lm_head"]),
}


def zoo_of(variant: Variant) -> dict[str, LoraConfig]:
    zoo = {name: make(variant.targets) for name, make in ZOO.items()}
    for config in zoo.values():
        config.exclude_modules = variant.excluded
        named = config.target_modules or ()
        config.target_modules = {variant.embedding if x == "embed_tokens" else x for x in named}
    return {**zoo, **variant.others()}


# Ranks and scales by pattern; every module of a layer, and both tables; not every layer.
_FEW = ("rank24_patterns", "rank64_everything", "missing_layers")


def few_of(variant: Variant) -> dict[str, LoraConfig]:
    """A few of the zoo, which reach every module, and those that the variant alone has."""
    zoo = zoo_of(variant)
    return {name: config for name, config in zoo.items() if name in _FEW or name not in ZOO}


def with_zoo(model: PreTrainedModel, configs: Mapping[str, LoraConfig] | None = None) -> PeftModel:
    """configs: None = those for Llama's modules."""
    wrapped: PreTrainedModel | PeftModel = model
    if configs is None:
        configs = {name: make(SEVEN) for name, make in ZOO.items()}
    for seed, (name, config) in enumerate(configs.items()):
        wrapped = add_adapter(wrapped, name, config, seed)
    assert isinstance(wrapped, PeftModel)
    return wrapped
