"""Rows of parity's table for families whose attention is to latents."""

from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from tests.server.model.families import text_parts
from tests.server.model.families.variant import EXPERTS, SEVEN, YARN_ROPE, Variant, of, on_experts

_SHARED = tuple(f"shared_experts.{name}" for name in SEVEN[4:])
_KV = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LOW_RANK = ("q_a_proj", "q_b_proj", *_KV)
_LATENTS: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 0,
}
_YARN = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9}
_V2 = Variant(
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    {**_LATENTS, "q_lora_rank": None},
    ("q_proj", *_KV),
    others=on_experts,
    beside=_SHARED,
)


def _on_experts() -> Mapping[str, LoraConfig]:
    """As of other models with experts, whose queries are one product."""
    found = on_experts()
    found["sparse_and_attention"].target_modules = {"q_b_proj", "kv_b_proj", "o_proj"}
    return found


_V3 = Variant(
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    {**_LATENTS, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    _LOW_RANK,
    others=_on_experts,
    beside=_SHARED,
)
_GLM = _V3._replace(
    config=Glm4MoeLiteConfig,
    model=Glm4MoeLiteForCausalLM,
    settings={
        **_LATENTS,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
)
_DENSE = {key: _LATENTS[key] for key in list(_LATENTS)[2:8]}
_ROWS: dict[str, Variant] = {
    "minicpm3": Variant(
        MiniCPM3Config,
        MiniCPM3ForCausalLM,
        {**_DENSE, "v_head_dim": None, "dim_model_base": 20, "mlp_bias": True},
        (*_LOW_RANK, *SEVEN[4:]),
    ),
    "mistral4": _V3._replace(
        config=Mistral4Config,
        model=Mistral4ForCausalLM,
        settings={
            **_V3.settings,
            "pad_token_id": 0,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3},
            "original_max_position_embeddings": 64,
        },
        is_adapted=False,
    ),
    "mistral3-mistral4": _V3._replace(
        config=text_parts.mistral3,
        model=Mistral3ForConditionalGeneration,
        settings={
            **_V3.settings,
            "model_type": "mistral4",
            "pad_token_id": 0,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3},
        },
        excluded=text_parts.OF_IMAGES,
        is_adapted=False,
    ),
    "youtu": Variant(
        YoutuConfig,
        YoutuForCausalLM,
        {**_DENSE, "attention_bias": True},
        (*_LOW_RANK, *SEVEN[4:]),
        is_adapted=False,
    ),
    "deepseek-v2": _V2,
    "deepseek-v2-groups": of(
        _V2,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters=_YARN,
        attention_bias=True,
    )._replace(
        is_adapted=False,
        targets=_LOW_RANK,
        beside=(*SEVEN[4:], *_SHARED),
        others=_on_experts,
    ),
    "deepseek-v3": of(_V3, rope_parameters=_YARN, attention_bias=True),
    "deepseek-v3-halves": of(
        _V3,
        q_lora_rank=None,
        rope_interleave=False,
        first_k_dense_replace=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
    )._replace(
        is_adapted=False, targets=_V2.targets, others=on_experts, beside=(*SEVEN[4:], *_SHARED)
    ),
    "glm4-moe-lite": _GLM._replace(is_adapted=False, beside=(*SEVEN[4:], *_SHARED)),
}
LATENTS = {name: row._replace(is_brief=True) for name, row in _ROWS.items()}
