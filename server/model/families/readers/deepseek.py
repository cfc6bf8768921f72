"""DeepSeek V2 and V3, and what has their attention: GLM 4.7 Flash, Kimi K2, Mistral 4, MiniCPM 3,
Youtu. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family, latent
from loraplex.server.model.families.family import ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import routed
from loraplex.server.model.families.rope import or_usual_table, original_context, rope_table
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import FeedForward, ModelSpec, PositionScale
from loraplex.server.model.spec.moe_spec import MoeSpec

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


def read_v2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read DeepSeek V2: experts by softmax, perhaps within the groups of the best ones."""
    fields = latent.with_usual(fields, _V2)
    for key, usual in (("norm_topk_prob", False), ("mlp_bias", False), ("scoring_func", "softmax")):
        fields.only(key, usual)
    sizes, of = _read_sizes(fields)
    attention, max_context = latent.attention(fields, sizes, of, interleaved=True)
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
    layers = [family.layer(sizes, attention)] * sizes.layers
    sparse = experts.read_first_dense(fields, sizes, 0)
    return routed.with_experts(
        fields, generation, sizes, layers, branches, sparse, max_context, eos=2
    )


def read_v3(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read DeepSeek V3 and R1, and Kimi K2: experts by corrected sigmoids, in groups."""
    fields = latent.with_usual(fields, _V3)
    sizes, of = _read_sizes(fields)
    return _scored(fields, generation, sizes, of, experts.read_first_dense(fields, sizes, 3))


def read_glm_lite(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """GLM 4.7 Flash: a list says which layers have experts."""
    head = fields.config.get("head_dim")
    fields = latent.with_usual(fields, _GLM if head is None else {**_GLM, "qk_rope_head_dim": head})
    if head not in (None, fields.config["qk_rope_head_dim"]):
        fields.refuse(f"head_dim must be qk_rope_head_dim, got {head!r}")
    fields.only("first_k_dense_replace", 1)
    sizes, of = _read_sizes(fields, epsilon=1e-5)
    sparse = frozenset(range(1, sizes.layers))
    kinds = fields.config.get("mlp_layer_types")
    if kinds is not None:
        sparse = routed.read_sparse_layers(fields, sizes, kinds)
    return _scored(fields, generation, sizes, of, sparse)


def _read_sizes(fields: Fields, **usual: Any) -> tuple[ModelSizes, latent.LatentSizes]:
    fields.only("moe_layer_freq", 1)
    experts.refuse_other_activation(fields)
    return latent.read_sizes(fields, **usual)


def _read_softmax(fields: Fields, sizes: ModelSizes) -> tuple[int, MoeSpec]:
    """The size of an expert, and experts by softmax."""
    size = fields.positive("moe_intermediate_size")
    counted = fields.changed(num_experts=fields.config[_ROUTED], num_local_experts=None)
    return size, routed.read_softmax(counted, sizes, (1, 1), size)


def _read_attention(
    fields: Fields, sizes: ModelSizes, of: latent.LatentSizes
) -> tuple[LatentSpec, int]:
    """Read attention, whose rotation turns neighbours where `rope_interleave` says so."""
    interleaved = bool(fields.config.get("rope_interleave"))
    return latent.attention(fields, sizes, of, interleaved=interleaved)


def _scored(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: ModelSizes,
    of: latent.LatentSizes,
    sparse: frozenset[int],
) -> ModelSpec:
    for key, usual in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        fields.only(key, usual)
    attention, max_context = _read_attention(fields, sizes, of)
    branches: tuple[FeedForward, ...] = routed.read_scored(fields, sizes, _ROUTED, _SHARED)
    layers = [family.layer(sizes, attention)] * sizes.layers
    return routed.with_experts(
        fields, generation, sizes, layers, branches, sparse, max_context, eos=1
    )


def read_mistral4(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Mistral 4: queries grow with their positions; experts by softmax in the model's dtype."""
    fields = or_usual_table(latent.with_usual(fields, _MISTRAL), _MISTRAL_ROPE)
    sizes, of = _read_sizes(fields)
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
    layers = [family.layer(sizes, replace(attention, q_scale=scale))] * sizes.layers
    sparse = experts.read_first_dense(fields, sizes, 0)
    return routed.with_experts(
        fields, generation, sizes, layers, branches, sparse, max_context, eos=2
    )


def read_minicpm(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """MiniCPM 3: dense, with factors of the embedding, of what steps add, and of logits."""
    config = fields.config
    if config.get("v_head_dim") is None:
        whole, heads = config.get("hidden_size"), config.get("num_attention_heads", 40)
        if isinstance(whole, int) and isinstance(heads, int) and heads > 0:
            fields = fields.changed(v_head_dim=whole // heads)
    fields = latent.with_usual(fields, _MINICPM)
    sizes, of = latent.read_sizes(fields, epsilon=1e-5)
    attention, max_context = latent.attention(fields, sizes, of, interleaved=False)
    depth = fields.number(fields.config, "scale_depth", sizes.layers**0.5)
    biases = family.Biases(mlp=bool(config.get("mlp_bias")))
    factor = depth / sizes.layers**0.5
    layer = family.layer(sizes, attention, family.mlp(sizes, biases), factor=factor)
    ids = family.read_eos(fields, generation, sizes, default=2)
    model = family.model(fields, sizes, [layer] * sizes.layers, max_context, ids, tied=True)
    base = fields.number(fields.config, "dim_model_base", sizes.hidden)
    scale = fields.number(fields.config, "scale_emb", None)
    head = replace(model.head, scale=base / sizes.hidden)
    return replace(model, embedding=replace(model.embedding, scale=scale), head=head)


def read_youtu(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Youtu: DeepSeek V3's attention, and an MLP in every layer."""
    fields = latent.with_usual(fields, {**_V3, "num_attention_heads": 16})
    sizes, of = latent.read_sizes(fields)
    attention, max_context = _read_attention(fields, sizes, of)
    ids = family.read_eos(fields, generation, sizes, default=128001)
    layers = [family.layer(sizes, attention)] * sizes.layers
    return family.model(fields, sizes, layers, max_context, ids, tied=True)
