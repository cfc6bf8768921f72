"""Llama but for biases, and for which features of a head a rotation pairs. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import LLAMA, RopeRules, read_rope
from loraplex.server.model.spec.model_spec import ModelSpec

_EOS = 2
_HELIUM, _ERNIE = RopeRules(theta=1e5), RopeRules(theta=5e5)


def read_seed_oss(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Seed-OSS: the biases of q, k and v, of o and of the MLP are keys of their own."""
    sizes = family.read_sizes(fields, kv_heads=8, head_dim=128)
    biases = family.Biases(
        qkv=bool(fields.config.get("attention_bias", True)),
        o=bool(fields.config.get("attention_out_bias", False)),
        mlp=bool(fields.config.get("mlp_bias", False)),
    )
    return _read(fields, generation, sizes, biases, LLAMA)


def read_helium(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read Helium's configuration. Neighbouring features turn together."""
    sizes = family.read_sizes(fields, kv_heads=20, head_dim=128, epsilon=1e-8)
    if sizes.is_sound and sizes.heads * sizes.head_dim != sizes.hidden:
        fields.refuse("head_dim times num_attention_heads must be hidden_size")
    biases = family.Biases(
        qkv=bool(fields.config.get("attention_bias", False)),
        mlp=bool(fields.config.get("mlp_bias", False)),
    )
    return _read(fields, generation, sizes, biases, _HELIUM, interleaved=True)


def read_ernie(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Ernie 4.5, without experts: neighbouring features turn together."""
    sizes = family.read_sizes(fields, kv_heads=2, head_dim=128, epsilon=1e-5)
    bias = bool(fields.config.get("use_bias", False))
    biases = family.Biases(qkv=bias, o=bias, mlp=bias)
    return _read(fields, generation, sizes, biases, _ERNIE, interleaved=True, tied=True)


def _read(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    biases: family.Biases,
    rules: RopeRules,
    *,
    interleaved: bool = False,
    tied: bool = False,
) -> ModelSpec:
    family.refuse_other_maths(fields)
    rope, max_context = read_rope(fields, sizes, rules)
    of = family.attention(sizes, replace(rope, interleaved=interleaved), biases=biases)
    layers = (family.layer(sizes, of, family.mlp(sizes, biases)),) * sizes.layers
    eos = family.read_eos(fields, generation, sizes, default=_EOS)
    return family.model(fields, sizes, layers, max_context, eos, tied=tied)
