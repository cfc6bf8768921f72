"""Known attention with experts of every router: Mixtral, Qwen 1.5 to 3, the first DeepSeek, GLM
4.5, dots 1, MiniMax M2, ERNIE 4.5, EXAONE, AFMoE, Phi 3.5, Hunyuan, OLMo and gpt-oss. Pure.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.family import Biases, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama, windowed
from loraplex.server.model.families.rope import LLAMA, RopeRules, read_rope, rope_table
from loraplex.server.model.spec.linear_spec import (
    MXFP4_BLOCK,
    ExpertForm,
    ExpertStorage,
    LinearSpec,
)
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    FeedForward,
    MlpSpec,
    ModelSpec,
)
from loraplex.server.model.spec.moe_spec import SWIGLU_ALPHA, SWIGLU_LIMIT, MoeSpec, RouterRule

_NAMES = experts.ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = experts.ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}", gate="w1", up="w3", down="w2"
)
_PHIMOE = _MIXTRAL._replace(other_router="mlp.router")
_AFMOE = _NAMES._replace(router="mlp.router.gate")
_GPT_OSS = _NAMES._replace(router="mlp.router")
# What AFMoE's configuration can say, and its code does not read.
_AFMOE_FIXED: dict[str, Any] = {
    "score_func": "sigmoid",
    "route_norm": True,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
}
# What MiniMax M2's own code can compute otherwise.
_MINIMAX_FIXED: dict[str, Any] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
# gpt-oss', where `config.json` says nothing of the rotation but its theta.
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_CORRECTION = "e_score_correction_bias"
# Where transformers 5 has tensors, and how published checkpoints call them.
_MINIMAX_STORED = ((rf"\.mlp\.{_CORRECTION}$", f".block_sparse_moe.{_CORRECTION}"),)
_ERNIE_STORED = ((r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),)
_EXAONE_STORED = ((rf"\.mlp\.gate\.{_CORRECTION}$", f".mlp.{_CORRECTION}"),)
_PHIMOE_STORED = ((r"\.mlp\.router\.weight$", ".mlp.gate.weight"),)


def read_mixtral(fields: Fields) -> ModelSpec:
    """Mixtral: Mistral with experts in every layer."""
    experts.refuse_other_routing(fields)
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5)
    windows = experts.read_same_windows(fields, sizes, fields.config.get("sliding_window"))
    counts = experts.read_counts(fields, default=8, default_of_token=2)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _MIXTRAL, "softmax_top_k_normed")
    model = llama.assembled(fields, sizes, rules=RopeRules(theta=1e6), windows=windows)
    return experts.with_experts(model, (replace(moe, wide_weights=True),))


def read_qwen3_moe(fields: Fields) -> ModelSpec:
    """Qwen3-MoE: Qwen3 with experts in some layers or all."""
    experts.refuse_other_routing(fields)
    sizes = family.read_sizes(fields, kv_heads=4)
    biases = family.attention_biases(fields)
    windows = experts.read_same_windows(fields, sizes, windowed.asked_window(fields))
    moe = read_softmax(fields, sizes, (128, 8), fields.positive("moe_intermediate_size", 768))
    model = llama.assembled(fields, sizes, biases, windows=windows, qk_norm=True, eos=None)
    return experts.with_experts(model, (moe,), read_sparse(fields, sizes))


def read_qwen3_vl_moe(fields: Fields) -> ModelSpec:
    """Read the text part of Qwen3-VL with experts, whose stored weights may be transposed."""
    config = fields.config
    kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    fields.only("use_sliding_window", False)
    fields.only("norm_topk_prob", True)
    fields = fields.changed(norm_topk_prob=True, num_key_value_heads=kv_heads)
    if config.get("num_local_experts") is None:
        fields = fields.changed(num_experts=config.get("num_experts", 60))
    return read_qwen3_moe(fields).mapped(_flipped)


def _flipped(branch: Branch) -> Branch:
    if not isinstance(branch, MoeSpec):
        return branch
    return replace(branch, gate_up=_flips(branch.gate_up), down=_flips(branch.down))


def _flips(linear: LinearSpec) -> LinearSpec:
    assert linear.stored is not None
    return replace(linear, stored=replace(linear.stored, flips=True))


def read_qwen2_moe(fields: Fields) -> ModelSpec:
    """Qwen 1.5 and 2 with experts: a gate weighs the shared one."""
    sizes = _read_sizes(fields, kv_heads=16)
    before = fields.count("max_window_layers", 28)
    window = windowed.asked_window(fields)
    windows = family.read_windows(
        fields, sizes, window, lambda layer: layer % 2 == 0 and layer < before
    )
    biases = Biases(qkv=bool(fields.config.get("qkv_bias", True)))
    moe = read_softmax(fields, sizes, (60, 4), fields.positive("moe_intermediate_size", 1408))
    size = fields.positive("shared_expert_intermediate_size", 5632)
    shared = experts.shared(sizes, size, "mlp.shared_expert", "mlp.shared_expert_gate")
    model = llama.assembled(fields, sizes, biases, windows=windows, eos=None)
    return experts.with_experts(model, (moe, shared), read_sparse(fields, sizes))


def read_deepseek(fields: Fields) -> ModelSpec:
    """Read the first DeepSeek with experts, whose code lies on the Hub."""
    for key, usual in (("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        fields.only(key, usual)
    sizes = _read_sizes(fields)
    counted = fields.changed(num_experts=fields.positive("n_routed_experts"))
    size = fields.positive("moe_intermediate_size", 1407)
    branches: tuple[FeedForward, ...] = (read_softmax(counted, sizes, (1, 1), size),)
    if fields.config.get("n_shared_experts"):
        shared = experts.shared(sizes, size * fields.positive("n_shared_experts"))
        branches = (*branches, shared)
    model = llama.assembled(fields, sizes, family.attention_biases(fields), eos=None)
    return experts.with_experts(model, branches, experts.read_first_dense(fields, sizes, 0))


def read_glm4_moe(fields: Fields) -> ModelSpec:
    """GLM 4.5 and 4.6."""
    config = fields.config
    sizes = _read_sizes(fields, kv_heads=8, epsilon=1e-5)
    biases = Biases(qkv=bool(config.get("attention_bias", False)))
    norms = bool(config.get("use_qk_norm", False))
    rules = RopeRules(partial=0.5)
    model = llama.assembled(fields, sizes, biases, rules, qk_norm=norms, eos=None)
    branches = read_scored_and_shared(fields, sizes, "n_routed_experts", "n_shared_experts")
    return experts.with_experts(model, branches, experts.read_first_dense(fields, sizes, 1))


def read_dots1(fields: Fields) -> ModelSpec:
    """Read dots 1's configuration. The last layers may have windows."""
    sizes = _read_sizes(fields, kv_heads=32)
    first = fields.count("max_window_layers", 62)
    window = fields.config.get("sliding_window", 4096)
    windows = family.read_windows(fields, sizes, window, lambda layer: layer >= first)
    biases = family.attention_biases(fields)
    model = llama.assembled(fields, sizes, biases, windows=windows, qk_norm=True, eos=None)
    branches = read_scored_and_shared(
        fields, sizes, "n_routed_experts", "n_shared_experts", normed=False, usual=(None, None)
    )
    return experts.with_experts(model, branches, experts.read_first_dense(fields, sizes, 0))


def read_minimax_m2(fields: Fields) -> ModelSpec:
    """MiniMax M2: norms of q and k over all heads; every layer has experts, and none is shared."""
    config = fields.config
    for key, usual in _MINIMAX_FIXED.items():
        fields.only(key, usual)
    sizes = _read_sizes(fields, kv_heads=8, head_dim=128)
    if config.get("rotary_dim") is not None:
        part = fields.positive("rotary_dim") / sizes.head_dim
        fields = fields.changed(partial_rotary_factor=config.get("partial_rotary_factor", part))
    counts = experts.read_counts(fields, default=256, default_of_token=8)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _MIXTRAL, "sigmoid_top_k_normed")
    correction = f"block_sparse_moe.{_CORRECTION}", (counts[0],)
    moe = replace(moe, wide_weights=True, correction=correction)
    rules = RopeRules(theta=5e6, partial=1.0)
    model = llama.assembled(fields, sizes, rules=rules, eos=200020)
    model = llama.with_attention(model, **windowed.wide_norms(sizes))
    return experts.with_experts(replace(model, stored_names=_MINIMAX_STORED), (moe,))


def read_ernie_moe(fields: Fields) -> ModelSpec:
    """ERNIE 4.5 with experts: softmax, corrected where experts are chosen."""
    config = fields.config
    sizes = _read_sizes(fields, kv_heads=4, epsilon=1e-5)
    bias = bool(config.get("use_bias", False))
    counted = fields.changed(
        num_experts=config.get("moe_num_experts", config.get("num_experts")),
        num_experts_per_tok=config.get("moe_k", config.get("num_experts_per_tok")),
    )
    size = fields.positive("moe_intermediate_size", 1536)
    counts = experts.read_counts(counted, default=64, default_of_token=6)
    moe = replace(
        experts.moe(sizes.hidden, size, counts, _NAMES, "softmax_top_k_normed"),
        wide_router=True,
        correction=(f"mlp.moe_statics.{_CORRECTION}", (1, counts[0])),
        norm_floor=fields.number(config, "moe_norm_min", 1e-12),
    )
    branches: tuple[FeedForward, ...] = (moe,)
    if config.get("moe_num_shared_experts", 2) != 0:
        branches = (moe, experts.shared(sizes, size * fields.positive("moe_num_shared_experts", 2)))
    if bias:
        fields.refuse("use_bias: experts with biases are not served")
    sparse = _ernie_layers(fields, sizes)
    rules = RopeRules(theta=5e5, interleaved=True)
    fields = family.tied_where_unsaid(fields)
    model = llama.assembled(fields, sizes, Biases(bias, bias, bias), rules)
    return experts.with_experts(replace(model, stored_names=_ERNIE_STORED), branches, sparse)


def _ernie_layers(fields: Fields, sizes: ModelSizes) -> frozenset[int]:
    config, step = fields.config, fields.positive("moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    if type(first) is not int or type(last) is not int:
        fields.refuse("moe_layer_start_index and moe_layer_end_index must be numbers of layers")
        return frozenset()
    last = sizes.layers - 1 if last == -1 else last
    every = range(step - 1, sizes.layers, step)
    return frozenset(layer for layer in every if first <= layer <= last)


def read_exaone_moe(fields: Fields) -> ModelSpec:
    """EXAONE with experts. Layers without a window have no rotation where others have one."""
    sizes = _read_sizes(fields, kv_heads=32, epsilon=1e-5)
    layers, max_context = windowed.read_exaone_layers(fields, sizes, family.llama_norms(sizes))
    moe, shared = read_scored_and_shared(
        fields, sizes, "num_experts", "num_shared_experts", factor=2.5, usual=(64, 1)
    )
    moe = replace(moe, correction=(f"mlp.{_CORRECTION}", (moe.experts,)))
    sparse = experts.read_first_dense(fields, sizes, 1)
    kinds = fields.config.get("mlp_layer_types")
    if kinds is not None:
        sparse = read_sparse_layers(fields, sizes, kinds)
    model = family.model(fields, sizes, layers, max_context, eos=53, stored_names=_EXAONE_STORED)
    return experts.with_experts(model, (moe, shared), sparse)


def read_sparse_layers(fields: Fields, sizes: ModelSizes, kinds: object) -> frozenset[int]:
    """Read the layers with experts. kinds: what `mlp_layer_types` says of each layer."""
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"dense", "sparse"}:
        fields.refuse("mlp_layer_types must say dense or sparse for each layer")
        kinds = []
    if sizes.is_sound and len(kinds) != sizes.layers:
        fields.refuse(f"mlp_layer_types must say so for {sizes.layers} layers")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def read_afmoe(fields: Fields) -> ModelSpec:
    """AFMoE (Trinity): gated attention, with a rotation where it has a window, and four norms."""
    config = fields.config
    for key, usual in _AFMOE_FIXED.items():
        fields.only(key, usual)
    sizes = _read_sizes(fields, head_dim=128, epsilon=1e-5)
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
    model = family.model(fields, sizes, layers, max_context)
    model = experts.with_experts(model, branches, sparse)
    scale = sizes.hidden**0.5 if config.get("mup_enabled") else 1.0
    return replace(model, embedding=replace(model.embedding, scale=scale))


def _gated(of: AttentionSpec) -> AttentionSpec:
    (q, *_), hidden = of.qkv.parts, of.qkv.in_features
    gate = LinearSpec("gates", hidden, (replace(q, path="self_attn.gate_proj"),), "column")
    return replace(of, gate=gate)


def _four_norms(sizes: ModelSizes) -> family.NormPlaces:
    names = (
        *("input_layernorm", "pre_mlp_layernorm"),
        *("post_attention_layernorm", "post_mlp_layernorm"),
    )
    return family.NormPlaces(*(family.norm(name, sizes) for name in names))


def read_phimoe(fields: Fields) -> ModelSpec:
    """Phi 3.5 with experts. A context ends where long factors would begin: transformers and the
    model's own code differ from there on.
    """
    config = fields.config
    fields.only("num_experts_per_tok", 2)
    fields = _with_one_scale(fields)
    sizes = _read_sizes(fields, epsilon=1e-5)
    counts = experts.read_counts(fields, default=16, default_of_token=2)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _PHIMOE, "sparse_mixer")
    moe = replace(moe, margin=2 * fields.number(config, "router_jitter_noise", 0.01))
    windows = experts.read_same_windows(fields, sizes, config.get("sliding_window"))
    biases, rules = family.attention_biases(fields), RopeRules(theta=1e6)
    model = llama.assembled(fields, sizes, biases, rules, windows=windows)
    model = family.with_norms(model, family.layer_norms(sizes))
    linear = replace(model.head.linear, bias=bool(config.get("lm_head_bias", False)))
    head = replace(model.head, linear=linear)
    model = replace(model, head=head, stored_names=_PHIMOE_STORED)
    return experts.with_experts(model, (moe,))


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


def read_hunyuan_moe(fields: Fields) -> ModelSpec:
    """Hunyuan with experts: as the dense one, with experts in every layer."""
    config = fields.config
    experts.refuse_other_activation(fields)
    size = _of_every_layer(config.get("moe_intermediate_size"))
    if size is not None and size != config.get("intermediate_size"):
        fields.refuse("moe_intermediate_size must be intermediate_size")
    dense = llama.read_hunyuan(fields)
    sizes = family.read_sizes(Fields(config), epsilon=1e-5)
    counted = fields.changed(
        num_experts=config.get("num_experts", config.get("num_local_experts")),
        num_local_experts=None,
        num_experts_per_tok=_of_every_layer(
            config.get("moe_topk", config.get("num_experts_per_tok"))
        ),
    )
    counts = experts.read_counts(counted, default=1, default_of_token=1)
    names = _NAMES._replace(router="mlp.gate.wg")
    moe = experts.moe(sizes.hidden, sizes.inner, counts, names, "softmax_top_k_normed")
    moe = replace(moe, wide_router=True)
    branches = moe, experts.shared(sizes, sizes.inner, "mlp.shared_mlp")
    return experts.with_experts(dense, branches)


def _of_every_layer(value: object) -> object:
    """Return the one value that a list has for every layer; others as they are."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    return value


def read_olmoe(fields: Fields) -> ModelSpec:
    """OLMoE: norms of q and k over all heads."""
    fields.only("clip_qkv", None)
    sizes = _read_sizes(fields, epsilon=1e-5)
    return _olmo(fields, sizes, (64, 8), LLAMA, eos=50279)


def read_flex_olmo(fields: Fields) -> ModelSpec:
    """FlexOlmo: as OLMoE, with norms behind attention and experts alone."""
    sizes = _read_sizes(fields)
    model = _olmo(fields, sizes, (7, 5), RopeRules(theta=5e5), eos=100257)
    return family.with_norms(model, family.norms_behind(sizes))


def _olmo(
    fields: Fields, sizes: ModelSizes, usual: tuple[int, int], rules: RopeRules, eos: int
) -> ModelSpec:
    family.refuse_other_head_dim(fields, sizes)
    model = llama.assembled(fields, sizes, family.attention_biases(fields), rules, eos=eos)
    model = llama.with_attention(model, **windowed.wide_norms(sizes))
    return experts.with_experts(model, (read_softmax(fields, sizes, usual, sizes.inner),))


def read_gpt_oss(fields: Fields) -> ModelSpec:
    """gpt-oss: experts with biases in every layer, sinks, windows in every other layer."""
    experts.refuse_other_routing(fields)
    config = fields.config
    if not rope_table(fields):
        fields = fields.changed(rope_parameters=_YARN)
    sizes = family.read_sizes(fields, kv_heads=8, head_dim=64, epsilon=1e-5)
    bias = bool(config.get("attention_bias", True))
    window = config.get("sliding_window", 128)
    windows = family.read_windows(fields, sizes, window, lambda layer: layer % 2 == 0)
    biases, rules = Biases(qkv=bias, o=bias), RopeRules(theta=150_000.0)
    model = llama.assembled(fields, sizes, biases, rules, windows=windows, eos=None)
    model = llama.with_attention(model, sinks=True)
    return experts.with_experts(model, (_read_gpt_oss_experts(fields, sizes),))


def _read_gpt_oss_experts(fields: Fields, sizes: ModelSizes) -> MoeSpec:
    for key, served in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(fields.config, key, served) != served:
            fields.refuse(f"{key} must be {served:g}, got {fields.config[key]!r}")
    if _is_mxfp4(fields):
        for key, size in (("hidden_size", sizes.hidden), ("intermediate_size", sizes.inner)):
            if sizes.is_sound and size % MXFP4_BLOCK:
                fields.refuse(f"{key} must be a multiple of {MXFP4_BLOCK} in MXFP4, got {size}")
    counts = experts.read_counts(fields, default=128, default_of_token=4)
    form: ExpertForm = "mxfp4" if _is_mxfp4(fields) else "stacked"
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _GPT_OSS, "top_k_softmax")
    return replace(
        moe,
        gate_up=_with_bias(moe.gate_up, form, interleaved=True),
        down=_with_bias(moe.down, form, interleaved=False),
        router=replace(moe.router, bias=True),
        activation="clamped_swiglu",
    )


def _is_mxfp4(fields: Fields) -> bool:
    return fields.table(fields.config, "quantization_config").get("quant_method") == "mxfp4"


def _with_bias(linear: LinearSpec, form: ExpertForm, *, interleaved: bool) -> LinearSpec:
    """Add a bias to a product of experts, whose weights lie as this family stores them."""
    assert linear.stored is not None
    storage = ExpertStorage(linear.stored.path, form, interleaved, transposed=True)
    return replace(linear, bias=True, stored=storage)


def _read_sizes(fields: Fields, **usual: Any) -> ModelSizes:
    experts.refuse_other_activation(fields)
    return family.read_sizes(fields, **usual)


def read_softmax(fields: Fields, sizes: ModelSizes, usual: tuple[int, int], size: int) -> MoeSpec:
    """Read experts by the softmax of all logits. usual: counts where `config.json` says nothing."""
    counts = experts.read_counts(fields, default=usual[0], default_of_token=usual[1])
    normed = bool(fields.config.get("norm_topk_prob", False))
    rule: RouterRule = "softmax_top_k_normed" if normed else "softmax_top_k"
    return experts.moe(sizes.hidden, size, counts, _NAMES, rule)


def read_scored_and_shared(
    fields: Fields,
    sizes: ModelSizes,
    routed: str,
    shared: str,
    *,
    factor: float = 1.0,
    normed: bool = True,
    usual: tuple[int | None, int | None] = (128, 1),
) -> tuple[MoeSpec, MlpSpec]:
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
    moe = experts.moe(sizes.hidden, size, counts, _NAMES, "sigmoid_top_k_normed")
    path = f"mlp.gate.{_CORRECTION}"
    moe = experts.read_scored(fields, moe, path, factor=factor, normed=normed)
    return moe, experts.shared(sizes, size * fields.positive(shared, usual[1]))


def read_sparse(fields: Fields, sizes: ModelSizes) -> frozenset[int]:
    """The layers with experts."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.refuse(f"mlp_only_layers must be numbers of layers, got {dense!r}")
        dense = []
    if not sizes.is_sound:
        return frozenset()
    return frozenset(range(step - 1, sizes.layers, step)).difference(dense)
