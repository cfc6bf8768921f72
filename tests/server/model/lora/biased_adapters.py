"""Adapters with biases, each in a model of its own."""

from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.manifest import SlabLayout
from tests.server.model.families.variants import Variant
from tests.server.model.hub_models import add_adapter, make_model
from tests.server.model.slabs import pack


def biased_configs(variant: Variant) -> dict[str, LoraConfig]:
    few, every = ["q_proj", "down_proj"], [*variant.targets]
    head = [*few, "lm_head"]
    return {
        "plain": LoraConfig(r=4, lora_alpha=8, target_modules=every),
        "of_b": LoraConfig(r=4, lora_alpha=6, target_modules=every, lora_bias=True),
        "of_b_and_head": LoraConfig(r=4, lora_alpha=6, target_modules=head, lora_bias=True),
        "of_targets": LoraConfig(r=4, target_modules=few, bias="lora_only"),
        "of_all": LoraConfig(r=4, target_modules=few, bias="all"),
        "of_b_and_all": LoraConfig(r=4, target_modules=few, bias="all", lora_bias=True),
        "dora": LoraConfig(r=4, target_modules=few, bias="all", use_dora=True),
    }


class Biased(NamedTuple):
    """An adapter in a model of its own: PEFT puts biases into the base."""

    oracle: PeftModel
    layout: SlabLayout
    slab: bytes


def biased(name: str, seed: int, config: LoraConfig, shards: int = 1) -> Biased:
    oracle = add_adapter(make_model(name), "one", config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            is_own = parameter_name.endswith(".bias") and "lora_" not in parameter_name
            if is_own and parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return Biased(oracle, *pack(oracle, "one", shards=shards))
