"""Llama 2 and 3, and what is stored as one of them. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import read_rope
from loraplex.server.model.spec.model_spec import ModelSpec


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    family.refuse_other_maths(fields)
    sizes = family.read_sizes(fields)
    rope, max_context = read_rope(fields, sizes)
    bias = bool(fields.config.get("attention_bias", False))
    biases = family.Biases(qkv=bias, o=bias, mlp=bool(fields.config.get("mlp_bias", False)))
    of = family.attention(sizes, rope, biases=biases)
    layer = family.layer(sizes, of, family.mlp(sizes, biases))
    eos = family.read_eos(fields, generation, sizes, default=2)
    return family.model(fields, sizes, (layer,) * sizes.layers, max_context, eos)
