"""Adapters with norms of their own, as PEFT saves them in `modules_to_save`."""

from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.manifest import SlabLayout
from tests.server.model.hub_models import add_adapter, make_model
from tests.server.model.slabs import pack

FEW = ["q_proj", "down_proj"]
BEFORE_ATTENTION, AT_END = "input_layernorm", "model.norm"
# What Gemma calls otherwise.
BEFORE_MLP = {"gemma2": "pre_feedforward_layernorm", "gemma3": "pre_feedforward_layernorm"}


def saved_norms(family: str) -> dict[str, dict[str, Any]]:
    """Options of LoraConfig, by the adapter's name."""
    before_mlp = BEFORE_MLP.get(family, "post_attention_layernorm")
    every = [BEFORE_ATTENTION, before_mlp, AT_END]
    return {
        "plain": {},
        "every": {"modules_to_save": every},
        "first": {"modules_to_save": [f"layers.0.{BEFORE_ATTENTION}"]},
        "end": {"modules_to_save": [AT_END]},
        "mlp_dora": {"modules_to_save": [before_mlp], "use_dora": True},
        "dora": {"use_dora": True},
        "with_head": {"modules_to_save": [BEFORE_ATTENTION, "lm_head"]},
    }


class WithNorms(NamedTuple):
    oracle: PeftModel
    layout: SlabLayout
    slab: bytes


def with_norms(
    family: str, seed: int, options: dict[str, Any], shards: int = 1, **settings: Any
) -> WithNorms:
    """shards: devices that share the base. settings: of the model."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=FEW, **options)
    oracle = add_adapter(make_model(family, **settings), "one", config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
                if "norm" in name:
                    parameter[::7] = 0.0
    return WithNorms(oracle, *pack(oracle, "one", shards=shards))
