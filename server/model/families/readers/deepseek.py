"""DeepSeek V2 and V3, and what has their attention: GLM 4.7 Flash, Kimi K2. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family, latent
from loraplex.server.model.families.family import ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import routed
from loraplex.server.model.spec.model_spec import FeedForward, ModelSpec

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


def read_v2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read DeepSeek V2: experts by softmax, perhaps within the groups of the best ones."""
    fields = latent.with_usual(fields, _V2)
    for key, usual in (("norm_topk_prob", False), ("mlp_bias", False), ("scoring_func", "softmax")):
        fields.only(key, usual)
    sizes, of = _read_sizes(fields)
    attention, max_context = latent.attention(fields, sizes, of, interleaved=True)
    size = fields.positive("moe_intermediate_size")
    counts = experts.read_counts(_counted(fields), default=1, default_of_token=1)
    moe = experts.moe(sizes.hidden, size, counts, routed.NAMES, "softmax_top_k")
    groups = (1, 1)
    method = fields.config.get("topk_method")
    if method == "group_limited_greedy":
        groups = experts.read_groups(fields, moe, 1)
    elif method != "greedy":
        fields.refuse(f"topk_method must be greedy or group_limited_greedy, got {method!r}")
    factor = fields.number(fields.config, "routed_scaling_factor", 1.0)
    moe = replace(moe, wide_router=True, wide_weights=True, groups=groups, factor=factor)
    moe = replace(moe, best_of_group=1)
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


def _counted(fields: Fields) -> Fields:
    return fields.changed(num_experts=fields.config[_ROUTED], num_local_experts=None)


def _scored(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: ModelSizes,
    of: latent.LatentSizes,
    sparse: frozenset[int],
) -> ModelSpec:
    for key, usual in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        fields.only(key, usual)
    interleaved = bool(fields.config.get("rope_interleave"))
    attention, max_context = latent.attention(fields, sizes, of, interleaved=interleaved)
    branches: tuple[FeedForward, ...] = routed.read_scored(fields, sizes, _ROUTED, _SHARED)
    layers = [family.layer(sizes, attention)] * sizes.layers
    return routed.with_experts(
        fields, generation, sizes, layers, branches, sparse, max_context, eos=1
    )
