"""Adapters with norms of their own, as PEFT saves them in `modules_to_save`."""

from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.manifest import SlabLayout
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import add_adapter, make_model
from tests.server.model.slabs import pack

FEW = ["q_proj", "down_proj"]
BEFORE_ATTENTION, AT_END = "input_layernorm", "model.norm"
# What Gemma calls otherwise.
BEFORE_MLP = {"gemma2": "pre_feedforward_layernorm", "gemma3": "pre_feedforward_layernorm"}
OF_HEADS = ["q_norm", "k_norm"]
_BEHIND = ["post_attention_layernorm", "post_feedforward_layernorm"]
# Norms of q and k, and behind attention and the MLP.
WITHIN = {"gemma2": _BEHIND, "gemma3": [*_BEHIND, *OF_HEADS], "qwen3": OF_HEADS}
# Norms of families without that of the MLP, or with other names; the one behind all layers last.
_OF_OPT, _OF_FALCON = ["self_attn_layer_norm", "final_layer_norm"], ["input_layernorm", "ln_f"]
OTHERS = {
    "gpt2": ["ln_1", "ln_2", "ln_f"],
    "gpt-neox": [BEFORE_ATTENTION, "post_attention_layernorm", "final_layer_norm"],
    "bloom": ["word_embeddings_layernorm", BEFORE_ATTENTION, "post_attention_layernorm", "ln_f"],
    "falcon": _OF_FALCON,
    "falcon-heads": ["post_attention_layernorm", *_OF_FALCON],
    "falcon-new": ["ln_attn", "ln_mlp", "ln_f"],
    "opt": _OF_OPT,
    "opt-narrow": _OF_OPT,
    "mpt": ["norm_1", "norm_2", "norm_f"],
    "phi": [BEFORE_ATTENTION, "final_layernorm"],
    "starcoder2": [BEFORE_ATTENTION, "post_attention_layernorm", AT_END],
    "nemotron": [BEFORE_ATTENTION, "post_attention_layernorm", AT_END],
    "cohere": [BEFORE_ATTENTION, AT_END],
    "cohere-norms": [BEFORE_ATTENTION, *OF_HEADS, AT_END],
    "hunyuan": [BEFORE_ATTENTION, "query_layernorm", "key_layernorm", AT_END],
    "mamba2": ["layers.0.norm", "norm_f"],
    "olmo2": [*_BEHIND, *OF_HEADS, AT_END],
    "persimmon": [BEFORE_ATTENTION, "q_layernorm", "k_layernorm", "final_layernorm"],
    "glm4": ["post_self_attn_layernorm", "post_mlp_layernorm", AT_END],
    "gemma4-moe": [f"post_feedforward_layernorm{end}" for end in ("", "_1", "_2")],
    "deepseek-v2": ["q_a_layernorm", AT_END],
}


def targets_of(family: str) -> list[str]:
    return [VARIANTS[family].targets[0]] if family in OTHERS else FEW


def saved_norms(family: str) -> dict[str, dict[str, Any]]:
    """Options of LoraConfig, by the adapter's name."""
    if family in OTHERS:
        every = OTHERS[family]
        biases = {} if family == "mamba2" else {"bias": "all"}  # and of convolutions
        return {
            "plain": {},
            "every": {"modules_to_save": every},
            "biases": biases,
            "end": {"modules_to_save": every[-1:], **biases},
        }
    before_mlp = BEFORE_MLP.get(family, "post_attention_layernorm")
    every = [BEFORE_ATTENTION, before_mlp, *WITHIN.get(family, ()), AT_END]
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
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets_of(family), **options)
    oracle = add_adapter(make_model(family, **settings), "one", config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
                if "norm" in name:
                    parameter[::7] = 0.0
    return WithNorms(oracle, *pack(oracle, "one", shards=shards))
