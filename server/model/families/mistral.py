"""Mistral, and Ministral with windows in some layers. Pure."""

from collections.abc import Mapping
from typing import Any

from server.model.families import family
from server.model.families.fields import Fields
from server.model.families.rope import read_rope
from server.model.spec import ModelSpec

_KV_HEADS = 8
_WINDOW = 4096


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_maths(fields)
    sizes = family.read_sizes(fields, kv_heads=_KV_HEADS)
    rope, max_context = read_rope(fields, sizes)
    windows = family.read_windows(fields, sizes, fields.config.get("sliding_window", _WINDOW))
    layers = [family.layer(sizes, family.attention(sizes, rope, window)) for window in windows]
    eos = family.read_eos(fields, generation, sizes, default=2)
    return family.model(fields, sizes, layers, max_context, eos)
