"""Llama 2 and 3, and what is stored as one of them. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import LLAMA, RopeRules, read_rope
from loraplex.server.model.spec.model_spec import ModelSpec

_EOS = 2


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    return assembled(fields, generation, family.read_sizes(fields), read_biases(fields))


def read_biases(fields: Fields) -> family.Biases:
    """Read one key for all matrices of attention, and one for the MLP."""
    biases = family.attention_biases(fields)
    return biases._replace(mlp=bool(fields.config.get("mlp_bias", False)))


def assembled(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    biases: family.Biases,
    rules: RopeRules = LLAMA,
    *,
    interleaved: bool = False,
    tied: bool = False,
    eos: int = _EOS,
) -> ModelSpec:
    """Make a model whose layers are all Llama's. interleaved: neighbouring features turn together.
    tied, eos: where `config.json` says nothing.
    """
    family.refuse_other_attention(fields)
    rope, max_context = read_rope(fields, sizes, rules)
    of = family.attention(sizes, replace(rope, interleaved=interleaved), biases=biases)
    layers = (family.layer(sizes, of, family.mlp(sizes, biases)),) * sizes.layers
    ids = family.read_eos(fields, generation, sizes, default=eos)
    return family.model(fields, sizes, layers, max_context, ids, tied=tied)
