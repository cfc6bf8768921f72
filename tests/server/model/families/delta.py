"""Rows of parity's table for families with layers of Gated DeltaNet."""

from typing import Any

from transformers import (
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.server.model.families import text_parts
from tests.server.model.families.text_parts import OF_IMAGES
from tests.server.model.families.variant import EXPERTS, SEVEN, Variant, of, on_experts

LINEAR, FULL = "linear_attention", "full_attention"
# Neither the first layer nor the last one attends; no size is another one's.
_SIZES: dict[str, Any] = {
    "layer_types": [LINEAR, FULL, LINEAR],
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    **EXPERTS,
    "num_experts": 7,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_MIXERS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *SEVEN[:4])
_NEXT_MIXERS = ("in_proj_qkvz", "in_proj_ba", "out_proj", *SEVEN[:4])
_SHARED = tuple(f"shared_expert.{name}" for name in SEVEN[4:])
_DENSE = Variant(Qwen3_5TextConfig, Qwen3_5ForCausalLM, _SIZES, (*_MIXERS, *SEVEN[4:]))
_MOE = Variant(
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeForCausalLM,
    {**_SIZES, **_EXPERTS},
    (*_MIXERS, "shared_expert_gate"),
    others=on_experts,
    beside=_SHARED,
)
_NEXT = Variant(
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    {**_SIZES, **_EXPERTS},
    (*_NEXT_MIXERS, "shared_expert_gate"),
    others=on_experts,
    beside=_SHARED,
)
_OLMO = Variant(
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    {
        **{key: size for key, size in _SIZES.items() if key != "head_dim"},
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "pad_token_id": None,
    },
    (*SEVEN[:4], "g_proj", "b_proj", "a_proj", *SEVEN[4:]),
)
DELTA: dict[str, Variant] = {
    "qwen3.5": _DENSE,
    # As many heads of values as of keys, and a kernel of the least size.
    "qwen3.5-even": of(
        _DENSE,
        layer_types=[FULL, LINEAR, FULL],
        linear_num_value_heads=2,
        linear_value_head_dim=7,
        linear_conv_kernel_dim=2,
        attention_bias=True,
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "qwen3.5-images": _DENSE._replace(
        config=text_parts.qwen35, model=Qwen3_5ForConditionalGeneration, excluded=OF_IMAGES
    ),
    "qwen3.5-moe": _MOE,
    "qwen3.5-moe-images": _MOE._replace(
        config=text_parts.qwen35_moe,
        model=Qwen3_5MoeForConditionalGeneration,
        is_adapted=False,
    ),
    "qwen3-next": _NEXT,
    "qwen3-next-dense-layer": of(
        _NEXT,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        linear_num_key_heads=3,
        linear_conv_kernel_dim=5,
        partial_rotary_factor=0.5,
    )._replace(is_adapted=False, beside=(*SEVEN[4:], *_SHARED)),
    "olmo-hybrid": _OLMO,
    # With a rotation, betas below 1 and a kernel of the least size.
    "olmo-hybrid-turned": of(
        _OLMO,
        layer_types=[FULL, LINEAR, FULL],
        linear_num_key_heads=3,
        linear_value_head_dim=7,
        linear_conv_kernel_dim=2,
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=True,
        tie_word_embeddings=True,
        is_adapted=False,
    ),
}
