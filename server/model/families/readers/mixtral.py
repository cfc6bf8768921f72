"""Mixtral: Mistral with experts in every layer. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.model_spec import ModelSpec

_KV_HEADS = 8
_EPSILON = 1e-5
_NAMES = experts.ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}", gate="w1", up="w3", down="w2"
)


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    experts.refuse_other_routing(fields)
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS, epsilon=_EPSILON)
    rope, max_context = read_rope(fields, sizes, RopeRules(theta=1_000_000.0))
    counts = experts.read_counts(fields, default=8, default_of_token=2)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _NAMES, "softmax_top_k_normed")
    moe = replace(moe, wide_weights=True)
    windows = experts.read_same_windows(fields, sizes, fields.config.get("sliding_window"))
    layers = [family.layer(sizes, family.attention(sizes, rope, window), moe) for window in windows]
    eos = family.read_eos(fields, generation, sizes, default=2)
    return family.model(fields, sizes, layers, max_context, eos)
