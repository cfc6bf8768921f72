"""Qwen3-MoE: Qwen3 with experts in some layers or all. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.linear_spec import LinearSpec
from loraplex.server.model.spec.model_spec import Branch, ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec, RouterRule

_KV_HEADS = 4
_WINDOW = 4096
_SIZE = 768
_NAMES = experts.ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    experts.refuse_other_routing(fields)
    config = fields.config
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS)
    rope, max_context = read_rope(fields, sizes)
    bias = bool(config.get("attention_bias", False))
    asked = config.get("use_sliding_window", False)
    window = config.get("sliding_window", _WINDOW) if asked else None
    biases = family.Biases(qkv=bias, o=bias)
    moe, sparse = _read_moe(fields, sizes), read_sparse(fields, sizes)
    layers = [
        family.layer(
            sizes,
            family.attention(sizes, rope, found, biases, qk_norm=True),
            moe if layer in sparse else None,
        )
        for layer, found in enumerate(experts.read_same_windows(fields, sizes, window))
    ]
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, layers, max_context, eos)


def read_vl(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read the text part of Qwen3-VL with experts, whose stored weights may be transposed."""
    config = fields.config
    kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    fields.only("use_sliding_window", False)
    fields.only("norm_topk_prob", True)
    fields = fields.changed(norm_topk_prob=True, num_key_value_heads=kv_heads)
    if config.get("num_local_experts") is None:
        fields = fields.changed(num_experts=config.get("num_experts", 60))
    model = read(fields, generation)
    return replace(model, layers=tuple(layer.mapped(_flipped) for layer in model.layers))


def _flipped(branch: Branch) -> Branch:
    if not isinstance(branch, MoeSpec):
        return branch
    return replace(branch, gate_up=_flips(branch.gate_up), down=_flips(branch.down))


def _flips(linear: LinearSpec) -> LinearSpec:
    assert linear.stored is not None
    return replace(linear, stored=replace(linear.stored, flips=True))


def _read_moe(fields: Fields, sizes: family.ModelSizes) -> MoeSpec:
    counts = experts.read_counts(fields, default=128, default_of_token=8)
    size = fields.positive("moe_intermediate_size", _SIZE)
    normed = bool(fields.config.get("norm_topk_prob", False))
    rule: RouterRule = "softmax_top_k_normed" if normed else "softmax_top_k"
    return experts.moe(sizes.hidden, size, counts, _NAMES, rule)


def read_sparse(fields: Fields, sizes: family.ModelSizes) -> frozenset[int]:
    """The layers with experts."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.refuse(f"mlp_only_layers must be numbers of layers, got {dense!r}")
        dense = []
    if not sizes.is_sound:
        return frozenset()
    return frozenset(range(step - 1, sizes.layers, step)).difference(dense)
