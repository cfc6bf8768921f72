"""Mistral, Ministral and CWM with windows in some layers, and Ministral 3. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import (
    RopeRules,
    or_usual_table,
    original_context,
    read_rope,
    rope_table,
)
from loraplex.server.model.spec.model_spec import ModelSpec, PositionScale

_KV_HEADS = 8
_WINDOW = 4096
_BETA = "llama_4_scaling_beta"
_CWM = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CWM_EOS = [128001, 128008, 128009]
# Ministral 3's, where `config.json` says nothing.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS)
    rope, max_context = read_rope(fields, sizes)
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window", _WINDOW))
    layers = [family.layer(sizes, family.attention(sizes, rope, window)) for window in windows]
    eos = family.read_eos(fields, generation, sizes, default=2)
    return family.model(fields, sizes, layers, max_context, eos)


def read_cwm(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read CWM: windows in all layers but every fourth, from the first on."""
    family.refuse_other_attention(fields)
    fields.only("attention_bias", False)
    fields = or_usual_table(fields, _CWM)
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS, head_dim=128, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes, RopeRules(theta=1e6))
    window = fields.config.get("sliding_window", 8192)
    windows = family.read_windows(fields, sizes, window, lambda layer: layer % 4 != 0)
    mlp = family.mlp(sizes, family.Biases(mlp=bool(fields.config.get("mlp_bias", False))))
    layers = [family.layer(sizes, family.attention(sizes, rope, window), mlp) for window in windows]
    if fields.config.get("eos_token_id") is None:
        fields = fields.changed(eos_token_id=_CWM_EOS)
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, layers, max_context, eos)


def read_ministral3(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Queries grow with their position."""
    family.refuse_other_attention(fields)
    fields.only("layer_types", None)
    if not rope_table(fields):
        fields = fields.changed(rope_parameters=_YARN)
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS, head_dim=128, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    table = rope_table(fields)
    scale = PositionScale(fields.number(table, _BETA, None), original_context(fields, table, sizes))
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window"))
    layers = [
        family.layer(sizes, replace(family.attention(sizes, rope, window), q_scale=scale))
        for window in windows
    ]
    eos = family.read_eos(fields, generation, sizes, default=2)
    return family.model(fields, sizes, layers, max_context, eos)
