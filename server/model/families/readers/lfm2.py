"""LFM2: short convolutions between layers of attention. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.sharding import Span
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.family import FULL, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import RopeRules, read_rope
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    FeedForward,
    LayerSpec,
    Mixer,
    ModelSpec,
    NormSpec,
    StepSpec,
)
from loraplex.server.model.spec.moe_spec import RouterRule
from loraplex.server.model.spec.state_spec import ShortConvSpec

CONV = "conv"
_RULES = RopeRules(theta=1e6)
_BLOCK = "feed_forward"
_NAMES = experts.ExpertNames(
    f"{_BLOCK}.gate", f"{_BLOCK}.experts.{{}}", "w1", "w3", "w2", stacked=f"{_BLOCK}.experts"
)
# What is added to the sum that weights of experts are divided by.
_ADDED = 1e-6


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """LFM2 and 2.5 without experts."""
    config = fields.config
    inner = config.get("block_ff_dim", config.get("intermediate_size"))
    fields = fields.changed(intermediate_size=inner)
    sizes = _read_sizes(fields)
    sizes = sizes._replace(inner=_adjusted(fields, sizes.inner))
    kinds = config.get("layer_types")
    if kinds is None:
        every = range(sizes.layers)
        attending = config.get("full_attn_idxs")
        if not isinstance(attending, list | None):
            fields.refuse(f"full_attn_idxs must be a list of layers, got {attending!r}")
            attending = None
        kinds = [FULL if attending is None or n in attending else CONV for n in every]
    return _read(fields, generation, sizes, kinds, [(_mlp(sizes),)] * sizes.layers)


def read_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """LFM2 with experts, but in the first layers."""
    config = fields.config
    sizes = _read_sizes(fields)
    dense = fields.count("num_dense_layers", 2)
    feeds: list[tuple[FeedForward, ...]] = [
        (_mlp(sizes),) if number < dense else (_read_experts(fields, sizes),)
        for number in range(sizes.layers)
    ]
    return _read(fields, generation, sizes, config.get("layer_types"), feeds)


def _read_sizes(fields: Fields) -> ModelSizes:
    family.refuse_other_attention(fields)
    fields.only("is_causal", True)
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5, epsilon_key="norm_eps")
    return sizes._replace(activation="silu")


def _adjusted(fields: Fields, inner: int) -> int:
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


def _read_experts(fields: Fields, sizes: ModelSizes) -> FeedForward:
    config = fields.config
    counts = experts.read_counts(fields, default=32, default_of_token=4)
    normed = bool(config.get("norm_topk_prob", True))
    size = fields.positive("moe_intermediate_size", 1792)
    rule: RouterRule = "sigmoid_top_k_normed" if normed else "sigmoid_top_k"
    moe = experts.moe(sizes.hidden, size, counts, _NAMES, rule)
    corrected = bool(config.get("use_expert_bias", True))
    return replace(
        moe,
        correction=(f"{_BLOCK}.expert_bias", (moe.experts,)) if corrected else None,
        norm_added=_ADDED,
        factor=fields.number(config, "routed_scaling_factor", 1.0),
    )


def _read(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: ModelSizes,
    kinds: object,
    feeds: list[tuple[FeedForward, ...]],
) -> ModelSpec:
    """Read the model. feeds: what follows the mixer in each layer."""
    rope, max_context = read_rope(fields, sizes, _RULES)
    mixers: dict[str, Mixer] = {
        FULL: _named(family.attention(sizes, rope, qk_norm=True)),
        CONV: _read_conv(fields, sizes),
    }
    named = family.read_mixed_kinds(fields, sizes, kinds, CONV)
    layers = [
        LayerSpec((StepSpec((mixers[kind],), _norm("operator_norm", sizes)), _feed(feed, sizes)))
        for kind, feed in zip(named, feeds, strict=False)
    ]
    tied = fields.config.get("tie_embedding", fields.config.get("tie_word_embeddings", True))
    fields = fields.changed(tie_word_embeddings=tied)
    eos = family.read_eos(fields, generation, sizes, default=2)
    model = family.model(fields, sizes, layers, max_context, eos)
    return replace(model, norm=_norm("model.embedding_norm", sizes))


def _norm(path: str, sizes: ModelSizes) -> NormSpec:
    return NormSpec(path, sizes.hidden, sizes.epsilon)


def _feed(branches: tuple[FeedForward, ...], sizes: ModelSizes) -> StepSpec:
    return StepSpec(branches, _norm("ffn_norm", sizes))


def _named(of: AttentionSpec) -> AttentionSpec:
    norms = {
        name: NormSpec(f"self_attn.{name[0]}_layernorm", norm.size, norm.epsilon)
        for name, norm in (("q_norm", of.q_norm), ("k_norm", of.k_norm))
        if norm is not None
    }
    return replace(of, o=family.with_paths(of.o, "self_attn.out_proj"), **norms)


def _mlp(sizes: ModelSizes) -> FeedForward:
    usual = family.mlp(sizes)
    gate_up = family.with_paths(usual.gate_up, f"{_BLOCK}.w1", f"{_BLOCK}.w3")
    return replace(usual, gate_up=gate_up, down=family.with_paths(usual.down, f"{_BLOCK}.w2"))


def _read_conv(fields: Fields, sizes: ModelSizes) -> ShortConvSpec:
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
