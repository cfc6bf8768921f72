"""Phi 3, 3.5 and 4, and Phi 4 mini: fused matrices, LongRoPE, rotation of a part of each head.
Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec

# Phi 3's first configurations say "su", and transformers takes "yarn" for the same.
_ROPE = RopeRules(
    partial=1.0,
    kinds={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    original_context=4096,
)
_EOS = 32000


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_maths(fields)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        fields.only(key, 1)
    fields.only("layer_types", None)
    sizes = family.read_sizes(fields, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes, _ROPE)
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window"))
    layers = [
        family.layer(sizes, _fused(family.attention(sizes, rope, window)), family.fused_mlp(sizes))
        for window in windows
    ]
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    return family.model(fields, sizes, layers, max_context, eos)


def _fused(of: AttentionSpec) -> AttentionSpec:
    return replace(of, qkv=family.fused(of.qkv, "self_attn.qkv_proj"))
