"""Rows of parity's table for families with short convolutions or Mamba-2."""

from functools import partial
from typing import Any

from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
)

from tests.server.model.families.variant import EXPERTS, Variant, of, on_experts

FULL, CONV = "full_attention", "conv"
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
}
