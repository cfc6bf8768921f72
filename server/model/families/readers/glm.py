"""GLM 4: rotation of neighbouring pairs in the first half of each head, fused gate and up. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec

_ROPE, _WHOLE = RopeRules(partial=0.5), RopeRules(partial=1.0)
_EPSILON = 1.5625e-07
_EOS = [151329, 151336, 151338]


def read_glm(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read the first GLM 4, whose norms lie in Llama's places."""
    return _read(fields, generation, family.llama_norms)


def read_glm4(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """GLM 4 0414: norms behind attention and MLP, too."""
    return _read(fields, generation, _glm4_norms)


def read_glm4v(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read the text part of GLM 4.1V and 4.6V: q, k and v always have a bias."""
    fields.only("attention_bias", True)
    head_dim = fields.positive("hidden_size") // fields.positive("num_attention_heads")
    said = fields.config.get("head_dim") or head_dim
    fields = fields.changed(attention_bias=True, head_dim=said)
    return _read(fields, generation, _glm4_norms, _WHOLE)


def _glm4_norms(sizes: family.ModelSizes) -> family.NormPlaces:
    return family.llama_norms(sizes)._replace(
        post_attention=NormSpec("post_self_attn_layernorm", sizes.hidden, sizes.epsilon),
        post_mlp=NormSpec("post_mlp_layernorm", sizes.hidden, sizes.epsilon),
    )


def _read(
    fields: Fields,
    generation: Mapping[str, Any],
    norms: Callable[[family.ModelSizes], family.NormPlaces],
    rules: RopeRules = _ROPE,
) -> ModelSpec:
    family.refuse_other_attention(fields)
    sizes = family.read_sizes(fields, kv_heads=2, head_dim=128, epsilon=_EPSILON)
    rope, max_context = read_rope(fields, sizes, rules)
    biases = family.Biases(qkv=bool(fields.config.get("attention_bias", True)))
    of = family.attention(sizes, replace(rope, interleaved=True), biases=biases)
    layer = family.layer(sizes, of, family.fused_mlp(sizes), norms(sizes))
    if fields.config.get("eos_token_id") is None:
        fields = fields.changed(eos_token_id=_EOS)
    eos = family.read_eos(fields, generation, sizes)
    return family.model(fields, sizes, (layer,) * sizes.layers, max_context, eos)
