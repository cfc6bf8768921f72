"""Attention to latents, as all families that have it spell it. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.adapters.sharding import Span
from loraplex.server.model.families import family
from loraplex.server.model.families.family import ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import LLAMA, RopeRules, read_rope, rope_table, yarn_mscale
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import NormSpec, RopeSpec

# Of the norms of queries and latents, whatever `rms_norm_eps` is.
_EPSILON = 1e-6


class LatentSizes(NamedTuple):
    """Sizes of attention to latents. queries: features between `q_a` and `q_b`; None = there is no
    `q_a`. The others are those of LatentSpec."""

    queries: int | None
    latent: int
    nope: int
    turned: int
    value: int


def with_usual(fields: Fields, usual: Mapping[str, Any]) -> Fields:
    """Return fields with these keys, where `config.json` has none of the name."""
    config = fields.config
    return fields.changed(**{key: value for key, value in usual.items() if key not in config})


def read_sizes(fields: Fields, **usual: Any) -> tuple[ModelSizes, LatentSizes]:
    """Read the sizes of a model. usual: as of `family.read_sizes`. The keys of latents are there,
    or usual already (`with_usual`).
    """
    family.refuse_other_attention(fields)
    queries = fields.config.get("q_lora_rank")
    of = LatentSizes(
        None if queries is None else fields.positive("q_lora_rank"),
        fields.positive("kv_lora_rank"),
        fields.positive("qk_nope_head_dim"),
        fields.positive("qk_rope_head_dim"),
        fields.positive("v_head_dim"),
    )
    sizes = family.read_sizes(fields.changed(head_dim=of.turned), **usual)
    if sizes.kv_heads != sizes.heads:
        fields.refuse("num_key_value_heads must be num_attention_heads, where heads share latents")
    if of.latent % 2:
        fields.refuse(f"kv_lora_rank must be even, got {of.latent}")
    return sizes, of


def attention(
    fields: Fields,
    sizes: ModelSizes,
    of: LatentSizes,
    rules: RopeRules = LLAMA,
    *,
    interleaved: bool,
) -> tuple[LatentSpec, int]:
    """Read the attention of all layers, and the context that its rotation reaches. interleaved: as
    of RopeSpec."""
    rope, max_context = read_rope(fields, sizes, rules)
    rope = replace(rope, rotary_dim=of.turned, interleaved=interleaved)
    head = of.nope + of.turned
    scale = head**-0.5 * _mscale(fields) ** 2
    return _spec(
        sizes, of, rope, scale, bias=bool(fields.config.get("attention_bias"))
    ), max_context


def _spec(
    sizes: ModelSizes, of: LatentSizes, rope: RopeSpec, scale: float, *, bias: bool
) -> LatentSpec:
    hidden, heads = sizes.hidden, sizes.heads
    q_a = norm = None
    q_in, q_name = hidden, "q_proj"
    if of.queries is not None:
        q_a = LinearSpec("q_a", hidden, (_part("q_a_proj", of.queries),), "none", bias)
        norm = NormSpec("self_attn.q_a_layernorm", of.queries, _EPSILON)
        q_in, q_name = of.queries, "q_b_proj"
    q_b = _part(q_name, heads * (of.nope + of.turned), of.nope + of.turned)
    kv_b = _part("kv_b_proj", heads * (of.nope + of.value), of.nope + of.value)
    kv_a = _part("kv_a_proj_with_mqa", of.latent + of.turned)
    return LatentSpec(
        qkv=LinearSpec("kv_a", hidden, (kv_a,), "none", bias),
        o=LinearSpec("o", heads * of.value, (_part("o_proj", hidden),), "row", bias),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=of.latent + of.turned,
        scale=scale,
        rope=rope,
        q_a=q_a,
        q_a_norm=norm,
        q_b=LinearSpec("q_b", q_in, (q_b,), "column"),
        kv_b=LinearSpec("kv_b", of.latent, (kv_b,), "column"),
        latent_norm=NormSpec("self_attn.kv_a_layernorm", of.latent, _EPSILON),
        latent=of.latent,
        nope=of.nope,
        value_dim=of.value,
    )


def _part(name: str, features: int, head: int | None = None) -> Part:
    spans = () if head is None else (Span(features, head),)
    return Part(f"self_attn.{name}", features, spans)


def _mscale(fields: Fields) -> float:
    """The factor of queries and of keys that a scaled rotation brings."""
    table = rope_table(fields)
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind == "default" or not table.get("mscale_all_dim"):
        return 1.0
    factor = fields.number(table, "factor", None)
    return yarn_mscale(factor, fields.number(table, "mscale_all_dim", None))
