"""Rows of parity's table for Gemma 4."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from peft import LoraConfig
from transformers import (
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

from tests.server.model.families import text_parts
from tests.server.model.families.text_parts import OF_IMAGES
from tests.server.model.families.variant import SEVEN, Variant, of, on_experts

WINDOWED, FULL = "sliding_attention", "full_attention"
# No size is another one's.
_SIZES: dict[str, Any] = {
    "layer_types": [FULL, WINDOWED, FULL],
    "head_dim": 12,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 7,
    "final_logit_softcapping": 5.0,
}
_SHARED: dict[str, Any] = {
    **_SIZES,
    "layer_types": [WINDOWED, FULL, FULL],
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 131,
}
_OF_INPUTS = ("per_layer_input_gate", "per_layer_projection")
_TARGETS = (*SEVEN[:4], *_OF_INPUTS, *SEVEN[4:])


def on_inputs() -> Mapping[str, LoraConfig]:
    """The product that all layers share, alone and beside modules of layers."""
    shared = "per_layer_model_projection"
    return {
        "inputs": LoraConfig(r=5, lora_alpha=7, target_modules=[shared]),
        "inputs_and_layers": LoraConfig(
            r=2, lora_alpha=3, target_modules=[shared, *_OF_INPUTS, "q_proj", "embed_tokens"]
        ),
        "all_linear": LoraConfig(r=3, lora_alpha=2, target_modules="all-linear"),
    }


_DENSE = Variant(Gemma4TextConfig, Gemma4ForCausalLM, _SIZES)
GEMMA4: dict[str, Variant] = {
    "gemma4": _DENSE,
    # Wide layers with values of their own, biases, and a head beside the embedding.
    "gemma4-values": of(
        _DENSE,
        attention_k_eq_v=False,
        attention_bias=True,
        tie_word_embeddings=False,
        final_logit_softcapping=None,
        is_adapted=False,
    ),
    # All layers have the same heads.
    "gemma4-even": of(
        _DENSE,
        global_head_dim=12,
        attention_k_eq_v=False,
        rope_parameters={
            WINDOWED: {"rope_type": "default", "rope_theta": 1e3},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
        },
        is_adapted=False,
    ),
    "gemma4-unified": Variant(
        Gemma4UnifiedTextConfig,
        Gemma4UnifiedForCausalLM,
        {**_SIZES, "use_bidirectional_attention": "vision"},
        is_adapted=False,
    ),
    "gemma4-moe": Variant(
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_SIZES,
            "experts_implementation": "eager",
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        others=partial(on_experts, "", "router.proj"),
    ),
    "gemma4-inputs": Variant(
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        _SHARED,
        _TARGETS,
        others=on_inputs,
    ),
    "gemma4-wide-mlp": Variant(
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {**_SHARED, "use_double_wide_mlp": True, "attention_k_eq_v": True},
        _TARGETS,
        is_adapted=False,
    ),
    "gemma4-images": Variant(
        text_parts.gemma4,
        Gemma4ForConditionalGeneration,
        _SHARED,
        _TARGETS,
        OF_IMAGES,
        others=lambda: {"inputs": on_inputs()["inputs"]},
    ),
}
