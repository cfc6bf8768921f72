"""DeepSeek V2 and V3, and what attends to latents as they do: GLM 4.7 Flash, Kimi K2, Mistral 4,
MiniCPM 3, Youtu. Pure.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.adapters.base import Span
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.family import ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import routed
from loraplex.server.model.families.rope import (
    LLAMA,
    RopeRules,
    or_usual_table,
    original_context,
    read_rope,
    rope_table,
    yarn_mscale,
)
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    FeedForward,
    ModelSpec,
    NormSpec,
    PositionScale,
    RopeSpec,
)
from loraplex.server.model.spec.moe_spec import MoeSpec

# Of the norms of queries and latents, whatever `rms_norm_eps` is.
_EPSILON = 1e-6

_ROUTED, _SHARED = "n_routed_experts", "n_shared_experts"
# Where `config.json` has no such key.
_V2: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "greedy",
    "moe_intermediate_size": 1407,
    _ROUTED: 64,
    _SHARED: 2,
}
_V3: dict[str, Any] = {
    **_V2,
    "num_attention_heads": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    _ROUTED: 256,
    _SHARED: 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
}
_GLM: dict[str, Any] = {
    **_V3,
    "num_attention_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    _ROUTED: 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}
_MISTRAL: dict[str, Any] = {
    **_V3,
    "num_attention_heads": 32,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    _ROUTED: 128,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_PARTIAL, _BETA = "partial_rotary_factor", "llama_4_scaling_beta"
_MISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
_MINICPM: dict[str, Any] = {
    "num_attention_heads": 40,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


class _LatentSizes(NamedTuple):
    """Sizes of attention to latents. queries: features between `q_a` and `q_b`; None = there is no
    `q_a`. The others are those of LatentSpec."""

    queries: int | None
    latent: int
    nope: int
    turned: int
    value: int


def _with_usual(fields: Fields, usual: Mapping[str, Any]) -> Fields:
    """Return fields with these keys, where `config.json` has none of the name."""
    config = fields.config
    return fields.changed(**{key: value for key, value in usual.items() if key not in config})


def _read_latent_sizes(fields: Fields, **usual: Any) -> tuple[ModelSizes, _LatentSizes]:
    """Read the sizes of a model. usual: as of `family.read_sizes`. The keys of latents are there,
    or usual already (`_with_usual`).
    """
    queries = fields.config.get("q_lora_rank")
    of = _LatentSizes(
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


def _attention(
    fields: Fields,
    sizes: ModelSizes,
    of: _LatentSizes,
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
    sizes: ModelSizes, of: _LatentSizes, rope: RopeSpec, scale: float, *, bias: bool
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


def read_v2(fields: Fields) -> ModelSpec:
    """Read DeepSeek V2: experts by softmax, perhaps within the groups of the best ones."""
    fields = _with_usual(fields, _V2)
    for key, usual in (("norm_topk_prob", False), ("mlp_bias", False), ("scoring_func", "softmax")):
        fields.only(key, usual)
    sizes, of = _read_sizes(fields)
    attention, max_context = _attention(fields, sizes, of, interleaved=True)
    size, moe = _read_softmax(fields, sizes)
    groups = (1, 1)
    method = fields.config.get("topk_method")
    if method == "group_limited_greedy":
        groups = experts.read_groups(fields, moe, 1)
    elif method != "greedy":
        fields.refuse(f"topk_method must be greedy or group_limited_greedy, got {method!r}")
    factor = fields.number(fields.config, "routed_scaling_factor", 1.0)
    moe = replace(moe, wide_router=True, wide_weights=True, factor=factor)
    moe = replace(moe, groups=groups, best_of_group=1)
    branches = moe, experts.shared(sizes, size * fields.positive(_SHARED))
    model = family.model(fields, sizes, family.layer(sizes, attention), max_context, eos=2)
    return experts.with_experts(model, branches, experts.read_first_dense(fields, sizes, 0))


def read_v3(fields: Fields) -> ModelSpec:
    """Read DeepSeek V3 and R1, and Kimi K2: experts by corrected sigmoids, in groups."""
    fields = _with_usual(fields, _V3)
    sizes, of = _read_sizes(fields)
    fields.only("head_dim", of.turned)
    return _scored(fields, sizes, of, experts.read_first_dense(fields, sizes, 3))


def read_glm_lite(fields: Fields) -> ModelSpec:
    """GLM 4.7 Flash: a list says which layers have experts."""
    head = fields.config.get("head_dim")
    fields = _with_usual(fields, _GLM if head is None else {**_GLM, "qk_rope_head_dim": head})
    if head not in (None, fields.config["qk_rope_head_dim"]):
        fields.refuse(f"head_dim must be qk_rope_head_dim, got {head!r}")
    fields.only("first_k_dense_replace", 1)
    sizes, of = _read_sizes(fields, epsilon=1e-5)
    sparse = frozenset(range(1, sizes.layers))
    kinds = fields.config.get("mlp_layer_types")
    if kinds is not None:
        sparse = routed.read_sparse_layers(fields, sizes, kinds)
    return _scored(fields, sizes, of, sparse)


def _read_sizes(fields: Fields, **usual: Any) -> tuple[ModelSizes, _LatentSizes]:
    fields.only("moe_layer_freq", 1)
    experts.refuse_other_activation(fields)
    return _read_latent_sizes(fields, **usual)


def _read_softmax(fields: Fields, sizes: ModelSizes) -> tuple[int, MoeSpec]:
    """The size of an expert, and experts by softmax."""
    size = fields.positive("moe_intermediate_size")
    counted = fields.changed(num_experts=fields.config[_ROUTED], num_local_experts=None)
    return size, routed.read_softmax(counted, sizes, (1, 1), size)


def _read_attention(fields: Fields, sizes: ModelSizes, of: _LatentSizes) -> tuple[LatentSpec, int]:
    """Read attention, whose rotation turns neighbours where `rope_interleave` says so."""
    interleaved = bool(fields.config.get("rope_interleave"))
    return _attention(fields, sizes, of, interleaved=interleaved)


def _scored(
    fields: Fields,
    sizes: ModelSizes,
    of: _LatentSizes,
    sparse: frozenset[int],
) -> ModelSpec:
    for key, usual in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        fields.only(key, usual)
    attention, max_context = _read_attention(fields, sizes, of)
    branches: tuple[FeedForward, ...] = routed.read_scored_and_shared(
        fields, sizes, _ROUTED, _SHARED
    )
    model = family.model(fields, sizes, family.layer(sizes, attention), max_context, eos=1)
    return experts.with_experts(model, branches, sparse)


def read_mistral4(fields: Fields) -> ModelSpec:
    """Mistral 4: queries grow with their positions; experts by softmax in the model's dtype."""
    fields = or_usual_table(_with_usual(fields, _MISTRAL), _MISTRAL_ROPE)
    sizes, of = _read_sizes(fields)
    fields.only("head_dim", of.nope + of.turned)
    table = dict(rope_table(fields))
    part = table.pop(_PARTIAL, None) or fields.config.get(_PARTIAL)
    if part not in (None, of.turned / (of.nope + of.turned)):
        fields.refuse(f"{_PARTIAL} must be the part of heads that turns, got {part!r}")
    turned = fields.changed(rope_parameters=table, rope_scaling=None, **{_PARTIAL: None})
    attention, max_context = _read_attention(turned, sizes, of)
    beta = fields.number(table, _BETA, None)
    scale = PositionScale(beta, original_context(turned, table, sizes))
    size, moe = _read_softmax(fields, sizes)
    moe = replace(
        moe,
        groups=experts.read_groups(fields, moe, moe.best_of_group),
        factor=fields.number(fields.config, "routed_scaling_factor", None),
    )
    branches = moe, experts.shared(sizes, size * fields.positive(_SHARED))
    layer = family.layer(sizes, replace(attention, q_scale=scale))
    model = family.model(fields, sizes, layer, max_context, eos=2)
    return experts.with_experts(model, branches, experts.read_first_dense(fields, sizes, 0))


def read_minicpm(fields: Fields) -> ModelSpec:
    """MiniCPM 3: dense, with factors of the embedding, of what steps add, and of logits."""
    config = fields.config
    if config.get("v_head_dim") is None:
        whole, heads = config.get("hidden_size"), config.get("num_attention_heads", 40)
        if isinstance(whole, int) and isinstance(heads, int) and heads > 0:
            fields = fields.changed(v_head_dim=whole // heads)
    fields = _with_usual(fields, _MINICPM)
    sizes, of = _read_latent_sizes(fields, epsilon=1e-5)
    attention, max_context = _attention(fields, sizes, of, interleaved=False)
    depth = fields.number(fields.config, "scale_depth", sizes.layers**0.5)
    biases = family.Biases(mlp=bool(config.get("mlp_bias")))
    factor = depth / sizes.layers**0.5
    layer = family.layer(sizes, attention, family.mlp(sizes, biases), factor=factor)
    model = family.model(fields, sizes, [layer] * sizes.layers, max_context, eos=2, tied=True)
    base = fields.number(fields.config, "dim_model_base", sizes.hidden)
    scale = fields.number(fields.config, "scale_emb", None)
    head = replace(model.head, scale=base / sizes.hidden)
    return replace(model, embedding=replace(model.embedding, scale=scale), head=head)


def read_youtu(fields: Fields) -> ModelSpec:
    """Youtu: DeepSeek V3's attention, and an MLP in every layer."""
    fields = _with_usual(fields, {**_V3, "num_attention_heads": 16})
    sizes, of = _read_latent_sizes(fields)
    fields.only("head_dim", of.turned)
    attention, max_context = _read_attention(fields, sizes, of)
    layer = family.layer(sizes, attention)
    return family.model(fields, sizes, layer, max_context, eos=128001, tied=True)
