"""Rows of parity's table for families with short convolutions or Mamba-2."""

from functools import partial
from typing import Any

from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

from tests.server.model.families.variant import EXPERTS, SEVEN, Variant, of, on_experts

FULL, CONV, LINEAR = "full_attention", "conv", "linear_attention"
_LFM2_SIZES: dict[str, Any] = {
    "layer_types": [CONV, FULL, CONV],
    "conv_L_cache": 3,
    "tie_word_embeddings": False,
}
_LFM2_MIXERS = ("q_proj", "k_proj", "in_proj", "v_proj", "out_proj")
_LFM2 = Variant(
    Lfm2Config,
    Lfm2ForCausalLM,
    {**_LFM2_SIZES, "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.3},
    (*_LFM2_MIXERS, "w1", "w3", "w2"),
)
_LFM2_MOE = Variant(
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    {
        **_LFM2_SIZES,
        **EXPERTS,
        "num_dense_layers": 1,
        "num_experts": 7,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.7,
    },
    _LFM2_MIXERS,
    others=partial(on_experts, "feed_forward"),
    beside=("w1", "w3", "w2"),
    is_brief=True,
)
# PEFT wraps `out_proj` in no model of Mamba's names: `test_states.py` merges by hand.
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 64 * 3 // 6,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
}
_BAMBA = Variant(
    BambaConfig,
    BambaForCausalLM,
    {**_MAMBA, "attn_layer_indices": [1]},
    ("q_proj", "k_proj", "in_proj", "v_proj", "o_proj", "out_proj", *SEVEN[4:]),
    is_brief=True,
)
_GRANITE_SIZES: dict[str, Any] = {
    **_MAMBA,
    "layer_types": [LINEAR, FULL, LINEAR],
    "mamba_n_groups": 1,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
}
_GRANITE_MIXERS = ("q_proj", "k_proj", "in_proj", "v_proj", "o_proj", "out_proj")
_GRANITE_SHARED = ("input_linear", "output_linear")
_GRANITE = Variant(
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    {**_GRANITE_SIZES, "num_local_experts": 0},
    (*_GRANITE_MIXERS, *_GRANITE_SHARED),
    is_brief=True,
)
_FALCON = Variant(
    FalconH1Config,
    FalconH1ForCausalLM,
    {
        **_MAMBA,
        "mamba_d_ssm": 72,
        "mamba_d_head": 12,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
        "mlp_multipliers": [0.6, 0.8],
    },
    ("q_proj", "k_proj", "in_proj", "v_proj", "o_proj", *SEVEN[4:]),
    beside=("out_proj",),
)
# The zoo of adapters wants three names.
_MAMBA2 = Variant(
    Mamba2Config,
    Mamba2ForCausalLM,
    {
        "num_heads": 6,
        "head_dim": 32,
        "expand": 3,
        "n_groups": 2,
        "state_size": 10,
        "conv_kernel": 4,
        "time_step_limit": (0.3, 0.9),
    },
    ("in_proj",) * 3,
    beside=("out_proj",),
    embedding="embeddings",
    is_brief=True,
)
_NEMOTRON_SIZES: dict[str, Any] = {
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 10,
    "time_step_min": 0.4,
}
_NEMOTRON = Variant(
    NemotronHConfig,
    NemotronHForCausalLM,
    {**_NEMOTRON_SIZES, "layers_block_type": [LINEAR, FULL, "mlp"]},
    ("q_proj", "k_proj", "in_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    beside=("out_proj",),
    embedding="embeddings",
)
WITH_STATES: dict[str, Variant] = {
    "lfm2": _LFM2,
    # A kernel of the least size, biases, and an MLP of the size that is said.
    "lfm2-biases": of(
        _LFM2,
        layer_types=[FULL, CONV, CONV],
        conv_L_cache=2,
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "lfm2-moe": _LFM2_MOE,
    "lfm2-moe-plain": of(
        _LFM2_MOE,
        num_dense_layers=0,
        conv_L_cache=5,
        use_expert_bias=False,
        norm_topk_prob=False,
    )._replace(is_adapted=False, beside=()),
    "bamba": _BAMBA,
    "bamba-biases": of(
        _BAMBA,
        attn_layer_indices=[0, 2],
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_n_groups=6,
        mamba_d_conv=2,
        time_step_limit=(0.3, 0.9),
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "granite-h": _GRANITE,
    "granite-h-moe": of(
        _GRANITE,
        **EXPERTS,
        num_local_experts=6,
        intermediate_size=40,
        position_embedding_type="rope",
        mamba_n_groups=2,
        is_adapted=False,
    ),
    "falcon-h1": _FALCON,
    "falcon-h1-normed": of(
        _FALCON,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=True,
        mlp_bias=True,
        is_adapted=False,
    ),
    "falcon-h1-gated": of(
        _FALCON,
        mamba_rms_norm=True,
        mamba_d_ssm=None,
        mamba_d_head="auto",
        mamba_proj_bias=True,
        attention_bias=True,
        ssm_in_multiplier=1.0,
        attention_in_multiplier=1.0,
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "mamba2": _MAMBA2,
    "mamba2-biases": of(
        _MAMBA2,
        use_bias=True,
        use_conv_bias=False,
        n_groups=6,
        conv_kernel=2,
        tie_word_embeddings=True,
        is_adapted=False,
    ),
    "nemotron-h": _NEMOTRON,
    "nemotron-h-moe": of(
        _NEMOTRON,
        **EXPERTS,
        layers_block_type=["moe", FULL, LINEAR],
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        routed_scaling_factor=1.7,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        n_groups=3,
    )._replace(
        beside=("out_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
        targets=("q_proj", "k_proj", "in_proj", "v_proj", "o_proj"),
        others=partial(on_experts, "mixer", up="up_proj"),
        is_brief=True,
    ),
    "nemotron-h-latent": of(
        _NEMOTRON,
        **EXPERTS,
        layers_block_type=["moe", FULL, LINEAR],
        n_routed_experts=6,
        moe_latent_size=20,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        mlp_bias=True,
    )._replace(
        beside=("out_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
        targets=(
            *("fc2_latent_proj", "q_proj", "fc1_latent_proj", "in_proj", "k_proj", "v_proj"),
            "o_proj",
        ),
        others=partial(on_experts, "mixer", up="up_proj"),
        is_brief=True,
    ),
}
