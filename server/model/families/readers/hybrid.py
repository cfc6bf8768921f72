"""Layers with states between layers that attend: Gated DeltaNet of Qwen3-Next, Qwen3.5 and OLMo
Hybrid, and short convolutions of LFM2. Pure.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from loraplex.adapters.base import Role, Span
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.family import FULL, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import routed, windowed
from loraplex.server.model.families.rope import RopeRules, read_rope, rope_table
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    FeedForward,
    LayerSpec,
    Mixer,
    ModelSpec,
    NormSpec,
    RopeSpec,
    StepSpec,
)
from loraplex.server.model.spec.moe_spec import RouterRule
from loraplex.server.model.spec.state_spec import DeltaNetSpec, ShortConvSpec

_LINEAR = "linear_attention"
_QWEN_HEAD_DIM = 256
_DELTA = "linear_attn"
_QWEN_RULES = RopeRules(partial=0.25)

_OLMO_EOS = 100257
_OLMO_EPSILON = 1e-5  # which `config.json` does not say
_OLMO_STORED = (
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
)

_CONV = "conv"
_LFM_RULES = RopeRules(theta=1e6)
_LFM_BLOCK = "feed_forward"
_LFM_NAMES = experts.ExpertNames(
    f"{_LFM_BLOCK}.gate",
    f"{_LFM_BLOCK}.experts.{{}}",
    "w1",
    "w3",
    "w2",
    stacked=f"{_LFM_BLOCK}.experts",
)
# What is added to the sum that weights of experts are divided by.
_LFM_ADDED = 1e-6


def read_qwen3_next(fields: Fields) -> ModelSpec:
    """Qwen3-Next: experts in most layers; a key head's q, k, v and z lie together."""
    sizes = _read_qwen_sizes(fields, kv_heads=2)
    if fields.config.get("num_experts") == 0:
        return _read_qwen(fields, sizes, by_key_head=True)
    if fields.config.get("norm_topk_prob") is None:
        fields = fields.changed(norm_topk_prob=True)
    branches = _read_qwen_experts(fields, sizes, (512, 10))
    sparse = routed.read_sparse(fields, sizes)
    return _read_qwen(fields, sizes, branches, sparse, by_key_head=True)


def read_qwen35(fields: Fields) -> ModelSpec:
    """Qwen3.5 and 3.6 without experts."""
    return _read_qwen(fields, _read_qwen_sizes(fields, kv_heads=4))


def read_qwen35_moe(fields: Fields) -> ModelSpec:
    """Qwen3.5 and 3.6 with experts in every layer."""
    fields.only("norm_topk_prob", True)
    size = fields.positive("moe_intermediate_size", 512)
    fields = fields.changed(norm_topk_prob=True, intermediate_size=size)
    sizes = _read_qwen_sizes(fields, kv_heads=2)
    branches = _read_qwen_experts(fields, sizes, (256, 8))
    return _read_qwen(fields, sizes, branches, frozenset(range(sizes.layers)))


def _read_qwen_sizes(fields: Fields, kv_heads: int) -> ModelSizes:
    for key, usual in (("hidden_act", "silu"), ("is_causal", True)):
        fields.only(key, usual)
    fields.only("attn_output_gate", True)
    return family.read_sizes(fields, kv_heads=kv_heads, head_dim=_QWEN_HEAD_DIM)


def _read_qwen_experts(
    fields: Fields, sizes: ModelSizes, usual: tuple[int, int]
) -> tuple[FeedForward, ...]:
    """Read routed experts, and the one that every token has. usual: counts of experts, and of those
    of a token, where `config.json` says nothing.
    """
    moe = routed.read_softmax(fields, sizes, usual, fields.positive("moe_intermediate_size", 512))
    size = fields.positive("shared_expert_intermediate_size", 512)
    return moe, experts.shared(sizes, size, "mlp.shared_expert", "mlp.shared_expert_gate")


def _read_qwen(
    fields: Fields,
    sizes: ModelSizes,
    branches: tuple[FeedForward, ...] = (),
    sparse: frozenset[int] = frozenset(),
    *,
    by_key_head: bool = False,
) -> ModelSpec:
    """Read the model. branches: of layers in `sparse`; others have an MLP."""
    rope, max_context = read_rope(fields, sizes, _QWEN_RULES)
    of = family.attention(sizes, rope, biases=family.attention_biases(fields), qk_norm=True)
    mixers: dict[str, Mixer] = {
        FULL: _qwen_attention(of),
        _LINEAR: _read_qwen_delta(fields, sizes, by_key_head=by_key_head),
    }
    dense = (family.mlp(sizes),)
    layers = [
        _qwen_layer(sizes, mixers[kind], branches if number in sparse else dense)
        for number, kind in enumerate(_read_qwen_kinds(fields, sizes))
    ]
    return family.model(fields, sizes, layers, max_context)


def _read_qwen_kinds(fields: Fields, sizes: ModelSizes) -> list[str]:
    """The kind of each layer."""
    kinds = fields.config.get("layer_types")
    if kinds is None:
        interval = fields.positive("full_attention_interval", 4)
        kinds = [_LINEAR if (n + 1) % interval else FULL for n in range(sizes.layers)]
    return family.read_mixed_kinds(fields, sizes, kinds, _LINEAR)


def _qwen_layer(sizes: ModelSizes, mixer: Mixer, branches: tuple[FeedForward, ...]) -> LayerSpec:
    before, behind = (
        NormSpec(path, sizes.hidden, sizes.epsilon, offset=1.0)
        for path in ("input_layernorm", "post_attention_layernorm")
    )
    return LayerSpec((StepSpec((mixer,), before), StepSpec(branches, behind)))


def _qwen_attention(of: AttentionSpec) -> AttentionSpec:
    """Attention whose q has a gate behind each head."""
    q, *kv = of.qkv.parts
    size = 2 * of.q_size
    wide = Part(q.path, size, (Span(size, 2 * of.head_dim),))
    norms = {
        name: replace(norm, offset=1.0)
        for name, norm in (("q_norm", of.q_norm), ("k_norm", of.k_norm))
        if norm is not None
    }
    return replace(of, qkv=replace(of.qkv, parts=(wide, *kv)), is_gated=True, **norms)


def _read_heads(fields: Fields, usual: tuple[int, int, int, int]) -> tuple[int, int, int, int, int]:
    """Heads of keys and of values, features of one of each, and tokens of the convolution. usual:
    of heads, where `config.json` says nothing."""
    keys = fields.positive("linear_num_key_heads", usual[0])
    values = fields.positive("linear_num_value_heads", usual[1])
    key_dim = fields.positive("linear_key_head_dim", usual[2])
    value_dim = fields.positive("linear_value_head_dim", usual[3])
    kernel = fields.positive("linear_conv_kernel_dim", 4)
    if values % keys:
        fields.refuse(f"{values} linear_num_value_heads do not divide among {keys} key heads")
        keys = values = 1
    if kernel == 1:
        fields.refuse("linear_conv_kernel_dim must be at least 2, got 1")
    return keys, values, key_dim, value_dim, kernel


def _read_qwen_delta(fields: Fields, sizes: ModelSizes, *, by_key_head: bool) -> DeltaNetSpec:
    keys, values, key_dim, value_dim, kernel = _read_heads(fields, (16, 32, 128, 128))
    mixed: dict[str, tuple[Span, ...]]
    gates: dict[str, tuple[Span, ...]]
    if by_key_head:
        size = 2 * (key_dim + value_dim * values // keys)
        mixed = {"in_proj_qkvz": (Span(keys * size, size),)}
        gates = {"in_proj_ba": (Span(2 * values, 2 * values // keys),)}
    else:
        of_keys = Span(keys * key_dim, key_dim)
        of_values = Span(values * value_dim, value_dim * values // keys)
        of_heads = Span(values, values // keys)
        mixed = {"in_proj_qkv": (of_keys, of_keys, of_values), "in_proj_z": (of_values,)}
        gates = {"in_proj_b": (of_heads,), "in_proj_a": (of_heads,)}
    out = Part(f"{_DELTA}.out_proj", sizes.hidden)
    return DeltaNetSpec(
        _column("in", sizes, mixed),
        _column("gates", sizes, gates),
        LinearSpec("out", values * value_dim, (out,), "row"),
        _DELTA,
        keys,
        values,
        key_dim,
        value_dim,
        kernel,
        sizes.epsilon,
        by_key_head,
    )


def _column(role: Role, sizes: ModelSizes, parts: Mapping[str, tuple[Span, ...]]) -> LinearSpec:
    """Make a product of hidden states. parts: names of modules, and how devices share them."""
    made = (
        Part(f"{_DELTA}.{name}", sum(span.features for span in spans), spans)
        for name, spans in parts.items()
    )
    return LinearSpec(role, sizes.hidden, tuple(made), "column")


def read_olmo_hybrid(fields: Fields) -> ModelSpec:
    """OLMo Hybrid: three of four layers are Gated DeltaNet, the fourth is one of OLMo 2."""
    for key, usual in (("hidden_act", "silu"), ("is_causal", True), ("clip_qkv", None)):
        fields.only(key, usual)
    sizes = family.read_sizes(fields)
    rope, max_context = _read_olmo_rope(fields, sizes)
    attention = family.attention(sizes, rope, biases=family.attention_biases(fields))
    of_kind = {
        FULL: windowed.olmo_layer(sizes, attention),
        _LINEAR: family.layer(sizes, _read_olmo_delta(fields, sizes)),
    }
    kinds = fields.config.get("layer_types")
    if kinds is None:
        kinds = [_LINEAR if (n + 1) % 4 else FULL for n in range(sizes.layers)]
        kinds = kinds if FULL in kinds else [*kinds[:-1], FULL]
    kinds = family.read_mixed_kinds(fields, sizes, kinds, _LINEAR)
    layers = [of_kind[kind] for kind in kinds]
    model = family.model(fields, sizes, layers, max_context, eos=_OLMO_EOS)
    return replace(model, stored_names=_OLMO_STORED)


def _read_olmo_rope(fields: Fields, sizes: ModelSizes) -> tuple[RopeSpec | None, int]:
    """Read the rotation; none where theta is null, as the published model has it."""
    said = {**fields.config, **rope_table(fields)}
    if "rope_theta" in said and said["rope_theta"] is None:
        return None, sizes.positions
    return read_rope(fields, sizes)


def _read_olmo_delta(fields: Fields, sizes: ModelSizes) -> DeltaNetSpec:
    usual = fields.positive("linear_num_key_heads", sizes.heads)
    key_dim = fields.positive("linear_key_head_dim", max(int(0.75 * sizes.hidden / usual), 1))
    heads = _read_heads(fields, (usual, sizes.heads, key_dim, 2 * key_dim))
    keys, values, key_dim, value_dim, kernel = heads
    of_keys = Span(keys * key_dim, key_dim)
    of_values = Span(values * value_dim, value_dim * values // keys)
    of_heads = Span(values, values // keys)
    mixed = {"q_proj": (of_keys,), "k_proj": (of_keys,), "v_proj": (of_values,)}
    gates = {"b_proj": (of_heads,), "a_proj": (of_heads,), "g_proj": (of_values,)}
    out = Part(f"{_DELTA}.o_proj", sizes.hidden)
    allows = fields.config.get("linear_allow_neg_eigval", True)
    if type(allows) is not bool:
        fields.refuse(f"linear_allow_neg_eigval must be true or false, got {allows!r}")
    return DeltaNetSpec(
        _column("in", sizes, mixed),
        _column("gates", sizes, gates),
        LinearSpec("out", of_values.features, (out,), "row"),
        _DELTA,
        *heads,
        _OLMO_EPSILON,
        gates_z=True,
        beta=2 if allows else 1,
        norm="o_norm",
        convs=tuple(
            (f"{name}_conv1d", span.features)
            for name, span in zip("qkv", (of_keys, of_keys, of_values), strict=True)
        ),
    )


def read_lfm2(fields: Fields) -> ModelSpec:
    """LFM2 and 2.5 without experts."""
    config = fields.config
    inner = config.get("block_ff_dim", config.get("intermediate_size"))
    fields = fields.changed(intermediate_size=inner)
    sizes = _read_lfm_sizes(fields)
    sizes = sizes._replace(inner=_adjusted_inner(fields, sizes.inner))
    kinds = config.get("layer_types")
    if kinds is None:
        every = range(sizes.layers)
        attending = config.get("full_attn_idxs")
        if not isinstance(attending, list | None):
            fields.refuse(f"full_attn_idxs must be a list of layers, got {attending!r}")
            attending = None
        kinds = [FULL if attending is None or n in attending else _CONV for n in every]
    return _read_lfm(fields, sizes, kinds, [(_lfm_mlp(sizes),)] * sizes.layers)


def read_lfm2_moe(fields: Fields) -> ModelSpec:
    """LFM2 with experts, but in the first layers."""
    config = fields.config
    sizes = _read_lfm_sizes(fields)
    dense = fields.count("num_dense_layers", 2)
    feeds: list[tuple[FeedForward, ...]] = [
        (_lfm_mlp(sizes),) if number < dense else (_read_lfm_experts(fields, sizes),)
        for number in range(sizes.layers)
    ]
    return _read_lfm(fields, sizes, config.get("layer_types"), feeds)


def _read_lfm_sizes(fields: Fields) -> ModelSizes:
    fields.only("is_causal", True)
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5, epsilon_key="norm_eps")
    return sizes._replace(activation="silu")


def _adjusted_inner(fields: Fields, inner: int) -> int:
    """Features within an MLP, as the family's code derives them."""
    config = fields.config
    if not config.get("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    inner = int(fields.number(config, "block_ffn_dim_multiplier", 1.0) * inner)
    multiple = fields.positive("block_multiple_of", 256)
    return multiple * ((inner + multiple - 1) // multiple)


def _read_lfm_experts(fields: Fields, sizes: ModelSizes) -> FeedForward:
    config = fields.config
    counts = experts.read_counts(fields, default=32, default_of_token=4)
    normed = bool(config.get("norm_topk_prob", True))
    size = fields.positive("moe_intermediate_size", 1792)
    rule: RouterRule = "sigmoid_top_k_normed" if normed else "sigmoid_top_k"
    moe = experts.moe(sizes.hidden, size, counts, _LFM_NAMES, rule)
    corrected = bool(config.get("use_expert_bias", True))
    return replace(
        moe,
        correction=(f"{_LFM_BLOCK}.expert_bias", (moe.experts,)) if corrected else None,
        norm_added=_LFM_ADDED,
        factor=fields.number(config, "routed_scaling_factor", 1.0),
    )


def _read_lfm(
    fields: Fields,
    sizes: ModelSizes,
    kinds: object,
    feeds: list[tuple[FeedForward, ...]],
) -> ModelSpec:
    """Read the model. feeds: what follows the mixer in each layer."""
    rope, max_context = read_rope(fields, sizes, _LFM_RULES)
    mixers: dict[str, Mixer] = {
        FULL: _lfm_attention(family.attention(sizes, rope, qk_norm=True)),
        _CONV: _read_lfm_conv(fields, sizes),
    }
    named = family.read_mixed_kinds(fields, sizes, kinds, _CONV)
    before, behind = family.norm("operator_norm", sizes), family.norm("ffn_norm", sizes)
    layers = [
        LayerSpec((StepSpec((mixers[kind],), before), StepSpec(feed, behind)))
        for kind, feed in zip(named, feeds, strict=False)
    ]
    tied = fields.config.get("tie_embedding", fields.config.get("tie_word_embeddings", True))
    fields = fields.changed(tie_word_embeddings=tied)
    last = "model.embedding_norm"
    return family.model(fields, sizes, layers, max_context, eos=2, last=last)


def _lfm_attention(of: AttentionSpec) -> AttentionSpec:
    norms = {
        name: NormSpec(f"self_attn.{name[0]}_layernorm", norm.size, norm.epsilon)
        for name, norm in (("q_norm", of.q_norm), ("k_norm", of.k_norm))
        if norm is not None
    }
    return replace(of, o=family.with_paths(of.o, "self_attn.out_proj"), **norms)


def _lfm_mlp(sizes: ModelSizes) -> FeedForward:
    usual = family.mlp(sizes)
    gate_up = family.with_paths(usual.gate_up, f"{_LFM_BLOCK}.w1", f"{_LFM_BLOCK}.w3")
    return replace(usual, gate_up=gate_up, down=family.with_paths(usual.down, f"{_LFM_BLOCK}.w2"))


def _read_lfm_conv(fields: Fields, sizes: ModelSizes) -> ShortConvSpec:
    hidden, kernel = sizes.hidden, fields.positive("conv_L_cache", 3)
    if kernel == 1:
        fields.refuse("conv_L_cache must be at least 2, got 1")
    bias = bool(fields.config.get("conv_bias", False))
    mixed = Part("conv.in_proj", 3 * hidden, (Span(hidden),) * 3)
    return ShortConvSpec(
        LinearSpec("in", hidden, (mixed,), "column", bias),
        LinearSpec("out", hidden, (Part("conv.out_proj", hidden),), "row", bias),
        "conv.conv",
        hidden,
        kernel,
        bias,
    )
