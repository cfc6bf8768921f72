"""Qwen3-MoE: Qwen3 with experts in some layers or all. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec

_KV_HEADS = 4
_WINDOW = 4096
_SIZE = 768
_NAMES = experts.ExpertNames("mlp.experts.{}", gate="gate_proj", up="up_proj", down="down_proj")


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_maths(fields)
    experts.refuse_other_routing(fields)
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS)
    rope, max_context = read_rope(fields, sizes)
    bias = bool(config.get("attention_bias", False))
    asked = config.get("use_sliding_window", False)
    window = config.get("sliding_window", _WINDOW) if asked else None
    moe, sparse = _read_moe(fields), _read_sparse(fields, sizes)
    layers = []
    for layer, found in enumerate(experts.read_same_windows(fields, sizes, window)):
        of = family.attention(sizes, rope, found, qk_norm=True)
        dense = family.layer(sizes, of, family.Biases(qkv=bias, o=bias))
        layers.append(experts.sparse(dense, moe, _NAMES) if layer in sparse else dense)
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, layers, max_context, eos)


def _read_moe(fields: Fields) -> MoeSpec:
    count, top_k = experts.read_counts(fields, default=128, default_of_token=8)
    normed = bool(fields.config.get("norm_topk_prob", False))
    return MoeSpec(
        experts=count,
        top_k=top_k,
        size=fields.positive("moe_intermediate_size", _SIZE),
        router="mlp.gate",
        rule="softmax_top_k_normed" if normed else "softmax_top_k",
    )


def _read_sparse(fields: Fields, sizes: family.ModelSizes) -> frozenset[int]:
    """The layers with experts."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.refuse(f"mlp_only_layers must be numbers of layers, got {dense!r}")
        dense = []
    if not sizes.is_sound:
        return frozenset()
    return frozenset(range(step - 1, sizes.layers, step)).difference(dense)
