"""Qwen2 and Qwen2.5: q, k and v have a bias. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.model_spec import ModelSpec

_WINDOW = 4096
_WINDOW_LAYERS = 28


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_attention(fields)
    sizes = family.read_sizes(fields)
    rope, max_context = read_rope(fields, sizes)
    biases = family.Biases(qkv=True)
    layers = [
        family.layer(sizes, family.attention(sizes, rope, window, biases))
        for window in read_windows(fields, sizes)
    ]
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, layers, max_context, eos)


def read_windows(fields: Fields, sizes: family.ModelSizes) -> tuple[int | None, ...]:
    """The window of each layer. Only the last layers have one, and only with
    `use_sliding_window`.
    """
    config = fields.config
    asked = config.get("use_sliding_window", False)
    window = config.get("sliding_window", _WINDOW) if asked else None
    first = fields.count("max_window_layers", _WINDOW_LAYERS)
    return family.read_windows(fields, sizes, window, lambda layer: layer >= first)
