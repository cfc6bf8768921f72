"""Rows of parity's table for families with experts of every router."""

from functools import partial
from typing import Any

from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    DbrxConfig,
    DbrxForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tests.server.model.families.variant import EXPERTS, SEVEN, YARN_ROPE, Variant, of, on_experts

_ATTENTION = SEVEN[:4]
_SHARED = tuple(f"shared_experts.{name}" for name in SEVEN[4:])
_GRANITE: dict[str, Any] = {
    **EXPERTS,
    "num_local_experts": 6,
    "intermediate_size": 40,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
}
_SCORED: dict[str, Any] = {
    **EXPERTS,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 0,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "head_dim": 24,
}
_GLM = Variant(
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    {**_SCORED, "n_routed_experts": 8, "n_shared_experts": 2, "use_qk_norm": True},
    _ATTENTION,
    others=on_experts,
    beside=_SHARED,
)
_DOTS = _GLM._replace(config=Dots1Config, model=Dots1ForCausalLM)
_QWEN2 = Variant(
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    {
        **EXPERTS,
        "num_experts": 7,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "num_key_value_heads": 1,
    },
    (*_ATTENTION, "shared_expert_gate", *(f"shared_expert.{name}" for name in SEVEN[4:])),
    others=on_experts,
)
_ERNIE = Variant(
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    {
        "experts_implementation": "eager",
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 3,
        "moe_layer_start_index": 0,
    },
    _ATTENTION,
    others=on_experts,
    beside=_SHARED,
)
_EXAONE = Variant(
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    {
        **_SCORED,
        "num_experts": 8,
        "num_shared_experts": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    _ATTENTION,
    others=on_experts,
    beside=_SHARED,
)
_DBRX = Variant(
    DbrxConfig,
    DbrxForCausalLM,
    {
        **EXPERTS,
        "d_model": 60,  # which the experts take before the usual name is read
        "hidden_size": 60,
        "num_attention_heads": 6,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 3},
    },
    ("attn.Wqkv", "attn.out_proj", "layer"),
    embedding="wte",
)
_PHIMOE = Variant(
    PhimoeConfig,
    PhimoeForCausalLM,
    {
        **EXPERTS,
        "num_experts_per_tok": 2,
        "num_local_experts": 7,
        "intermediate_size": 40,
        "router_jitter_noise": 0.2,
        "sliding_window": 7,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    _ATTENTION,
    others=partial(on_experts, router="router"),
)
_MINIMAX = Variant(
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    {
        **EXPERTS,
        "num_local_experts": 7,
        "intermediate_size": 40,
        "head_dim": 24,
        "rotary_dim": 12,
    },
    _ATTENTION,
    others=on_experts,
)
_OLMOE = Variant(
    OlmoeConfig,
    OlmoeForCausalLM,
    {**EXPERTS, "num_experts": 7, "intermediate_size": 40},
    _ATTENTION,
    others=on_experts,
)
_ROWS: dict[str, Variant] = {
    "afmoe": Variant(
        AfmoeConfig,
        AfmoeForCausalLM,
        {
            **EXPERTS,
            "num_experts": 7,
            "moe_intermediate_size": 24,
            "num_shared_experts": 3,
            "num_dense_layers": 1,
            "head_dim": 24,
            "sliding_window": 7,
            "global_attn_every_n_layers": 2,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
        _ATTENTION,
        others=partial(on_experts, router="router.gate"),
        beside=("self_attn.gate_proj", *SEVEN[4:], *_SHARED),
    ),
    "dbrx": _DBRX,
    "dbrx-plain": of(
        _DBRX,
        attn_config={"kv_n_heads": 6, "clip_qkv": 99.0, "rope_theta": 1e4},
        ffn_config={
            "ffn_hidden_size": 24,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_normalize_expert_weights": None,
        },
        is_adapted=False,
    ),
    "dots1": of(_DOTS, attention_bias=True, sliding_window=7, max_window_layers=1),
    "dots1-dense-first": of(
        _DOTS, first_k_dense_replace=1, norm_topk_prob=False, n_group=1, topk_group=1
    )._replace(is_adapted=False, beside=(*SEVEN[4:], *_SHARED)),
    "ernie-moe": _ERNIE,
    "ernie-moe-some": of(
        _ERNIE,
        moe_num_shared_experts=0,
        moe_layer_interval=2,
        moe_norm_min=0.9,
        tie_word_embeddings=False,
    )._replace(is_adapted=False, beside=SEVEN[4:]),
    "exaone-moe": _EXAONE,
    "exaone-moe-dense-first": of(
        _EXAONE,
        mlp_layer_types=["dense", "sparse", "dense"],
        n_group=1,
        topk_group=1,
    )._replace(is_adapted=False, beside=(*SEVEN[4:], *_SHARED)),
    "flex-olmo": Variant(
        FlexOlmoConfig,
        FlexOlmoForCausalLM,
        {
            **EXPERTS,
            "num_experts": 7,
            "intermediate_size": 40,
            "attention_bias": True,
            "pad_token_id": 0,
        },
        _ATTENTION,
        others=on_experts,
    ),
    "glm4-moe": of(_GLM, attention_bias=True),
    "glm4-moe-dense-first": of(
        _GLM,
        first_k_dense_replace=2,
        use_qk_norm=False,
        rope_parameters={**YARN_ROPE, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
    )._replace(is_adapted=False, beside=(*SEVEN[4:], *_SHARED)),
    "granite-moe": Variant(
        GraniteMoeConfig,
        GraniteMoeForCausalLM,
        {**_GRANITE, "attention_bias": True},
        _ATTENTION,
        others=partial(on_experts, "block_sparse_moe", "router"),
    ),
    "granite-moe-shared": Variant(
        GraniteMoeSharedConfig,
        GraniteMoeSharedForCausalLM,
        {**_GRANITE, "shared_intermediate_size": 24},
        (*_ATTENTION, "input_linear", "output_linear"),
        others=partial(on_experts, "block_sparse_moe", "router"),
    ),
    "hunyuan-moe": Variant(
        HunYuanMoEV1Config,
        HunYuanMoEV1ForCausalLM,
        {
            "experts_implementation": "eager",
            "num_experts": 7,
            "moe_topk": [3, 3, 3],  # as Hunyuan-A13B
            "moe_intermediate_size": [40, 40, 40],
            "intermediate_size": 40,
            "head_dim": 24,
            "attention_bias": True,
        },
        _ATTENTION,
        others=partial(on_experts, router="gate.wg"),
        beside=SEVEN[4:],
    ),
    "minimax-m2": _MINIMAX,
    "phimoe": _PHIMOE,
    "phimoe-long": of(
        _PHIMOE,
        is_adapted=False,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "short_mscale": 1.2,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 128,
        },
    ),
    "olmoe": of(_OLMOE, num_key_value_heads=4),
    "olmoe-normed": of(
        _OLMOE, norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True
    )._replace(is_adapted=False),
    "qwen2-moe": _QWEN2,
    "qwen2-moe-windows": of(
        _QWEN2,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=2,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        qkv_bias=False,
    )._replace(is_adapted=False, targets=(*_QWEN2.targets, *SEVEN[4:])),
}
ROUTED = {name: row._replace(is_brief=True) for name, row in _ROWS.items()}
