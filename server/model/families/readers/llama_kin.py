"""Llama but for biases, and for which features of a head a rotation pairs. Pure."""

from collections.abc import Mapping
from typing import Any

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama
from loraplex.server.model.families.rope import RopeRules
from loraplex.server.model.spec.model_spec import ModelSpec

_HELIUM, _ERNIE = RopeRules(theta=1e5), RopeRules(theta=5e5)


def read_seed_oss(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Seed-OSS: the biases of q, k and v, of o and of the MLP are keys of their own."""
    sizes = family.read_sizes(fields, kv_heads=8, head_dim=128)
    biases = family.Biases(
        qkv=bool(fields.config.get("attention_bias", True)),
        o=bool(fields.config.get("attention_out_bias", False)),
        mlp=bool(fields.config.get("mlp_bias", False)),
    )
    return llama.assembled(fields, generation, sizes, biases)


def read_helium(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read Helium's configuration. Neighbouring features turn together."""
    sizes = family.read_sizes(fields, kv_heads=20, head_dim=128, epsilon=1e-8)
    family.refuse_other_head_dim(fields, sizes)
    biases = family.Biases(
        qkv=bool(fields.config.get("attention_bias", False)),
        mlp=bool(fields.config.get("mlp_bias", False)),
    )
    return llama.assembled(fields, generation, sizes, biases, _HELIUM, interleaved=True)


def read_ernie(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Ernie 4.5, without experts: neighbouring features turn together."""
    sizes = family.read_sizes(fields, kv_heads=2, head_dim=128, epsilon=1e-5)
    bias = bool(fields.config.get("use_bias", False))
    biases = family.Biases(qkv=bias, o=bias, mlp=bias)
    return llama.assembled(fields, generation, sizes, biases, _ERNIE, interleaved=True, tied=True)
