"""Known attention with experts of every router: Qwen 2, GLM 4.5, dots 1, MiniMax M2, ERNIE 4.5,
EXAONE, Hunyuan and OLMo with experts. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import exaone, olmo, qwen3_moe, renamed
from loraplex.server.model.families.rope import LLAMA, RopeRules, read_rope, rope_table
from loraplex.server.model.spec.linear_spec import LinearSpec
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    FeedForward,
    LayerSpec,
    ModelSpec,
    NormSpec,
)
from loraplex.server.model.spec.moe_spec import MoeSpec, RouterRule

NAMES = experts.ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = experts.ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}", gate="w1", up="w3", down="w2"
)
_PHIMOE = _MIXTRAL._replace(other_router="mlp.router")
_AFMOE = NAMES._replace(router="mlp.router.gate")
# What AFMoE's configuration can say, and its code does not read.
_AFMOE_FIXED: dict[str, Any] = {
    "score_func": "sigmoid",
    "route_norm": True,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
}
_CORRECTION = "e_score_correction_bias"


def read_qwen2_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Qwen 1.5 and 2 with experts: a gate weighs the shared one."""
    config = fields.config
    sizes = read_sizes(fields, kv_heads=16)
    rope, max_context = read_rope(fields, sizes)
    asked = config.get("use_sliding_window", False)
    before = fields.count("max_window_layers", 28)
    windows = family.read_windows(
        fields,
        sizes,
        config.get("sliding_window", 4096) if asked else None,
        lambda layer: layer % 2 == 0 and layer < before,
    )
    biases = family.Biases(qkv=bool(config.get("qkv_bias", True)))
    moe = read_softmax(fields, sizes, (60, 4), fields.positive("moe_intermediate_size", 1408))
    size = fields.positive("shared_expert_intermediate_size", 5632)
    shared = experts.shared(sizes, size, "mlp.shared_expert", "mlp.shared_expert_gate")
    layers = [family.layer(sizes, family.attention(sizes, rope, each, biases)) for each in windows]
    sparse = qwen3_moe.read_sparse(fields, sizes)
    return with_experts(fields, generation, sizes, layers, (moe, shared), sparse, max_context)


def read_deepseek(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read the first DeepSeek with experts, whose code lies on the Hub."""
    config = fields.config
    for key, usual in (("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        fields.only(key, usual)
    sizes = read_sizes(fields)
    rope, max_context = read_rope(fields, sizes)
    biases = family.attention_biases(fields)
    counted = fields.changed(num_experts=fields.positive("n_routed_experts"))
    size = fields.positive("moe_intermediate_size", 1407)
    moe = read_softmax(counted, sizes, (1, 1), size)
    branches: tuple[FeedForward, ...] = (moe,)
    if config.get("n_shared_experts"):
        branches = (moe, experts.shared(sizes, size * fields.positive("n_shared_experts")))
    layers = [family.layer(sizes, family.attention(sizes, rope, biases=biases))] * sizes.layers
    sparse = experts.read_first_dense(fields, sizes, 0)
    return with_experts(fields, generation, sizes, layers, branches, sparse, max_context)


def read_glm4_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """GLM 4.5 and 4.6."""
    config = fields.config
    sizes = read_sizes(fields, kv_heads=8, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes, RopeRules(partial=0.5))
    of = family.attention(
        sizes,
        rope,
        biases=family.Biases(qkv=bool(config.get("attention_bias", False))),
        qk_norm=bool(config.get("use_qk_norm", False)),
    )
    branches = read_scored(fields, sizes, "n_routed_experts", "n_shared_experts")
    layers = [family.layer(sizes, of)] * sizes.layers
    sparse = experts.read_first_dense(fields, sizes, 1)
    return with_experts(fields, generation, sizes, layers, branches, sparse, max_context)


def read_dots1(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Read dots 1's configuration. The last layers may have windows."""
    config = fields.config
    sizes = read_sizes(fields, kv_heads=32)
    rope, max_context = read_rope(fields, sizes)
    biases = family.attention_biases(fields)
    first = fields.count("max_window_layers", 62)
    window = config.get("sliding_window", 4096)
    layers = [
        family.layer(
            sizes,
            family.attention(sizes, rope, each, biases, qk_norm=True),
        )
        for each in family.read_windows(fields, sizes, window, lambda layer: layer >= first)
    ]
    branches = read_scored(
        fields, sizes, "n_routed_experts", "n_shared_experts", normed=False, usual=(None, None)
    )
    sparse = experts.read_first_dense(fields, sizes, 0)
    return with_experts(fields, generation, sizes, layers, branches, sparse, max_context)


def read_minimax_m2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """MiniMax M2: norms of q and k over all heads; every layer has experts, and none is shared."""
    config = fields.config
    for key, usual in _MINIMAX_FIXED.items():
        fields.only(key, usual)
    sizes = read_sizes(fields, kv_heads=8, head_dim=128)
    if config.get("rotary_dim") is not None:
        part = fields.positive("rotary_dim") / sizes.head_dim
        fields = fields.changed(partial_rotary_factor=config.get("partial_rotary_factor", part))
    rope, max_context = read_rope(fields, sizes, RopeRules(theta=5e6, partial=1.0))
    of = olmo.with_wide_norms(family.attention(sizes, rope), sizes)
    counts = experts.read_counts(fields, default=256, default_of_token=8)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _MIXTRAL, "sigmoid_top_k_normed")
    moe = replace(
        moe, wide_weights=True, correction=(f"block_sparse_moe.{_CORRECTION}", (counts[0],))
    )
    layers = [family.layer(sizes, of)] * sizes.layers
    every = range(sizes.layers)
    return with_experts(fields, generation, sizes, layers, (moe,), every, max_context, eos=200020)


def read_ernie_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """ERNIE 4.5 with experts: softmax, corrected where experts are chosen."""
    config = fields.config
    sizes = read_sizes(fields, kv_heads=4, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes, RopeRules(theta=5e5))
    bias = bool(config.get("use_bias", False))
    biases = family.Biases(qkv=bias, o=bias, mlp=bias)
    counted = fields.changed(
        num_experts=config.get("moe_num_experts", config.get("num_experts")),
        num_experts_per_tok=config.get("moe_k", config.get("num_experts_per_tok")),
    )
    size = fields.positive("moe_intermediate_size", 1536)
    counts = experts.read_counts(counted, default=64, default_of_token=6)
    moe = experts.moe(sizes.hidden, size, counts, NAMES, "softmax_top_k_normed")
    moe = replace(
        moe,
        wide_router=True,
        correction=(f"mlp.moe_statics.{_CORRECTION}", (1, counts[0])),
        norm_floor=fields.number(config, "moe_norm_min", 1e-12),
    )
    branches: tuple[FeedForward, ...] = (moe,)
    number = config.get("moe_num_shared_experts", 2)
    if number != 0:
        branches = (moe, experts.shared(sizes, size * fields.positive("moe_num_shared_experts", 2)))
    if bias:
        fields.refuse("use_bias: experts with biases are not served")
    of = family.attention(sizes, replace(rope, interleaved=True), biases=biases)
    layers = [family.layer(sizes, of, family.mlp(sizes, biases))] * sizes.layers
    sparse = _ernie_layers(fields, sizes)
    fields = family.tied_where_unsaid(fields)
    return with_experts(fields, generation, sizes, layers, branches, sparse, max_context, eos=2)


def _ernie_layers(fields: Fields, sizes: family.ModelSizes) -> frozenset[int]:
    config, step = fields.config, fields.positive("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    if type(first) is not int or type(last) is not int:
        fields.refuse("moe_layer_start_index and moe_layer_end_index must be numbers of layers")
        return frozenset()
    last = sizes.layers - 1 if last == -1 else last
    every = range(step - 1, sizes.layers, step)
    return frozenset(layer for layer in every if first <= layer <= last)


def read_exaone_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """EXAONE with experts. Layers without a window have no rotation where others have one."""
    config = fields.config
    sizes = read_sizes(fields, kv_heads=32, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    windows = exaone.read_windows(fields, sizes)
    is_full = config.get("sliding_window", 4096) is None
    layers = [
        family.layer(
            sizes,
            family.attention(sizes, rope if window or is_full else None, window, qk_norm=True),
        )
        for window in windows
    ]
    branches = read_scored(
        fields, sizes, "num_experts", "num_shared_experts", factor=2.5, usual=(64, 1)
    )
    moe = branches[0]
    if isinstance(moe, MoeSpec):
        moe = replace(moe, correction=(f"mlp.{_CORRECTION}", (moe.experts,)))
    sparse = experts.read_first_dense(fields, sizes, 1)
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        sparse = read_sparse_layers(fields, sizes, kinds)
    every = (moe, *branches[1:])
    return with_experts(fields, generation, sizes, layers, every, sparse, max_context, eos=53)


def read_sparse_layers(fields: Fields, sizes: family.ModelSizes, kinds: object) -> frozenset[int]:
    """Read the layers with experts. kinds: what `mlp_layer_types` says of each layer."""
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"dense", "sparse"}:
        fields.refuse("mlp_layer_types must say dense or sparse for each layer")
        kinds = []
    if sizes.is_sound and len(kinds) != sizes.layers:
        fields.refuse(f"mlp_layer_types must say so for {sizes.layers} layers")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def read_afmoe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """AFMoE (Trinity): gated attention, with a rotation where it has a window, and four norms."""
    config = fields.config
    for key, usual in _AFMOE_FIXED.items():
        fields.only(key, usual)
    sizes = read_sizes(fields, head_dim=128, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    every = fields.positive("global_attn_every_n_layers", 4)
    window = fields.positive("sliding_window", 1024)
    biases = family.attention_biases(fields)
    windows = family.read_windows(fields, sizes, window, lambda layer: (layer + 1) % every > 0)
    layers = [
        family.layer(
            sizes,
            _gated(family.attention(sizes, rope if each else None, each, biases, qk_norm=True)),
            norms=_four_norms(sizes),
        )
        for each in windows
    ]
    counts = experts.read_counts(fields, default=64, default_of_token=6)
    size = fields.positive("moe_intermediate_size", 1408)
    moe = replace(
        experts.moe(sizes.hidden, size, counts, _AFMOE, "sigmoid_top_k_normed"),
        wide_weights=True,
        correction=("mlp.expert_bias", (counts[0],)),
        norm_floor=1e-20,
        factor=fields.number(config, "route_scale", 1.0),
    )
    branches = moe, experts.shared(sizes, size * fields.positive("num_shared_experts", 2))
    fields = fields.changed(first_k_dense_replace=config.get("num_dense_layers"))
    sparse = experts.read_first_dense(fields, sizes, 1)
    model = with_experts(fields, generation, sizes, layers, branches, sparse, max_context)
    scale = sizes.hidden**0.5 if config.get("mup_enabled") else 1.0
    return replace(model, embedding=replace(model.embedding, scale=scale))


def _gated(of: AttentionSpec) -> AttentionSpec:
    (q, *_), hidden = of.qkv.parts, of.qkv.in_features
    gate = LinearSpec("gates", hidden, (replace(q, path="self_attn.gate_proj"),), "column")
    return replace(of, gate=gate)


def _four_norms(sizes: family.ModelSizes) -> family.NormPlaces:
    names = (
        *("input_layernorm", "pre_mlp_layernorm"),
        *("post_attention_layernorm", "post_mlp_layernorm"),
    )
    return family.NormPlaces(*(NormSpec(name, sizes.hidden, sizes.epsilon) for name in names))


def read_phimoe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Phi 3.5 with experts. A context ends where long factors would begin: transformers and the
    model's own code differ from there on.
    """
    config = fields.config
    fields.only("num_experts_per_tok", 2)
    fields = _with_one_scale(fields)
    sizes = read_sizes(fields, epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes, RopeRules(theta=1e6))
    biases = family.attention_biases(fields)
    norms = family.layer_norms(sizes)
    counts = experts.read_counts(fields, default=16, default_of_token=2)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _PHIMOE, "sparse_mixer")
    moe = replace(moe, margin=2 * fields.number(config, "router_jitter_noise", 0.01))
    layers = [
        family.layer(sizes, family.attention(sizes, rope, each, biases), moe, norms)
        for each in experts.read_same_windows(fields, sizes, config.get("sliding_window"))
    ]
    model = family.layer_normed(fields, generation, sizes, layers, max_context, 2)
    linear = replace(model.head.linear, bias=bool(config.get("lm_head_bias", False)))
    return replace(model, head=replace(model.head, linear=linear))


def _with_one_scale(fields: Fields) -> Fields:
    table = rope_table(fields)
    if table.get("rope_type", table.get("type", "default")) == "default":
        return fields
    if table.get("rope_type", table.get("type")) != "longrope":
        fields.refuse("rope_type must be default or longrope")
    scale = table.get("short_mscale")
    if scale is None or scale != table.get("long_mscale"):
        fields.refuse("short_mscale and long_mscale must be the same number")
    original = table.get("original_max_position_embeddings")
    original = fields.config.get("original_max_position_embeddings", original)
    return fields.changed(
        max_position_embeddings=original,
        rope_scaling=None,
        rope_parameters={
            "rope_theta": fields.config.get("rope_theta", 1e6),
            **table,
            "attention_factor": scale,
        },
    )


def read_hunyuan_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Hunyuan with experts: as the dense one, with experts in every layer."""
    config = fields.config
    experts.refuse_other_activation(fields)
    size = config.get("moe_intermediate_size")
    if size is not None and size != config.get("intermediate_size"):
        fields.refuse("moe_intermediate_size must be intermediate_size")
    dense = renamed.read_hunyuan(fields, generation)
    sizes = family.read_sizes(Fields(config), epsilon=1e-5)
    counted = fields.changed(
        num_experts=config.get("num_experts", config.get("num_local_experts")),
        num_local_experts=None,
        num_experts_per_tok=config.get("moe_topk", config.get("num_experts_per_tok")),
    )
    counts = experts.read_counts(counted, default=1, default_of_token=1)
    names = NAMES._replace(router="mlp.gate.wg")
    moe = experts.moe(sizes.hidden, sizes.inner, counts, names, "softmax_top_k_normed")
    moe = replace(moe, wide_router=True)
    branches = moe, experts.shared(sizes, sizes.inner, "mlp.shared_mlp")
    layer = experts.with_branches(dense.layers[0], branches)
    return replace(dense, layers=(layer,) * dense.num_layers)


def read_olmoe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """OLMoE: norms of q and k over all heads."""
    fields.only("clip_qkv", None)
    return _read_olmo(fields, generation, LLAMA, (64, 8), 1e-5, 50279)


def read_flex_olmo(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """FlexOlmo: as OLMoE, with norms behind attention and experts alone."""
    rules = RopeRules(theta=5e5)
    model = _read_olmo(fields, generation, rules, (7, 5), 1e-6, 100257)
    attend, feed = model.layers[0].steps
    size, epsilon = model.hidden_size, model.norm.epsilon
    steps = (
        replace(attend, pre=None, post=NormSpec("post_attention_layernorm", size, epsilon)),
        replace(feed, pre=None, post=NormSpec("post_feedforward_layernorm", size, epsilon)),
    )
    return replace(model, layers=(LayerSpec(steps),) * model.num_layers)


def _read_olmo(
    fields: Fields,
    generation: Mapping[str, Any],
    rules: RopeRules,
    usual: tuple[int, int],
    epsilon: float,
    eos: int,
) -> ModelSpec:
    sizes = read_sizes(fields, epsilon=epsilon)
    family.refuse_other_head_dim(fields, sizes)
    rope, max_context = read_rope(fields, sizes, rules)
    biases = family.attention_biases(fields)
    of = olmo.with_wide_norms(family.attention(sizes, rope, biases=biases), sizes)
    moe = read_softmax(fields, sizes, usual, sizes.inner)
    layers = [family.layer(sizes, of)] * sizes.layers
    every = range(sizes.layers)
    return with_experts(fields, generation, sizes, layers, (moe,), every, max_context, eos=eos)


# What MiniMax M2's own code can compute otherwise.
_MINIMAX_FIXED: dict[str, Any] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}


def read_sizes(fields: Fields, **usual: Any) -> family.ModelSizes:
    family.refuse_other_attention(fields)
    experts.refuse_other_activation(fields)
    return family.read_sizes(fields, **usual)


def read_softmax(
    fields: Fields, sizes: family.ModelSizes, usual: tuple[int, int], size: int
) -> MoeSpec:
    """Read experts by the softmax of all logits. usual: counts where `config.json` says nothing."""
    counts = experts.read_counts(fields, default=usual[0], default_of_token=usual[1])
    normed = bool(fields.config.get("norm_topk_prob", False))
    rule: RouterRule = "softmax_top_k_normed" if normed else "softmax_top_k"
    return experts.moe(sizes.hidden, size, counts, NAMES, rule)


def read_scored(
    fields: Fields,
    sizes: family.ModelSizes,
    routed: str,
    shared: str,
    *,
    factor: float = 1.0,
    normed: bool = True,
    usual: tuple[int | None, int | None] = (128, 1),
) -> tuple[FeedForward, ...]:
    """Read experts by corrected sigmoids, and those that every token uses. routed, shared: keys of
    their numbers; usual: these, where `config.json` says nothing.
    """
    config = fields.config
    number = config.get(routed, config.get("num_local_experts"))
    counted = fields.changed(
        num_experts=fields.positive(routed, usual[0]) if number is None else number,
        num_local_experts=None,
    )
    most = 8 if usual[0] is not None else fields.positive("num_experts_per_tok")
    counts = experts.read_counts(counted, default=1, default_of_token=most)
    size = fields.positive("moe_intermediate_size", 1024 if routed == "num_experts" else 1408)
    moe = experts.moe(sizes.hidden, size, counts, NAMES, "sigmoid_top_k_normed")
    path = f"mlp.gate.{_CORRECTION}"
    moe = experts.read_scored(fields, moe, path, factor=factor, normed=normed)
    return moe, experts.shared(sizes, size * fields.positive(shared, usual[1]))


def with_experts(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    layers: Sequence[LayerSpec],
    branches: Sequence[FeedForward],
    sparse: Collection[int],
    max_context: int,
    *,
    eos: int | None = None,
) -> ModelSpec:
    """Make the model. layers: dense; of those in `sparse` the last step has these branches."""
    made = [
        experts.with_branches(layer, branches) if index in sparse else layer
        for index, layer in enumerate(layers)
    ]
    ids = family.read_eos(fields, generation, sizes, default=eos)
    return family.model(fields, sizes, made, max_context, ids)
