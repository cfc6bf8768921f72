"""Qwen3-Next and Qwen3.5: layers of Gated DeltaNet between layers of gated attention. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.base import Role
from loraplex.adapters.sharding import Span
from loraplex.server.model.families import experts, family
from loraplex.server.model.families.family import FULL, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import qwen3_moe, routed
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
from loraplex.server.model.spec.state_spec import DeltaNetSpec

LINEAR = "linear_attention"
_HEAD_DIM = 256
PATH = "linear_attn"
_RULES = RopeRules(partial=0.25)


def read_next(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Qwen3-Next: experts in most layers; a key head's q, k, v and z lie together."""
    sizes = _read_sizes(fields, kv_heads=2)
    if fields.config.get("num_experts") == 0:
        return _read(fields, generation, sizes, by_key_head=True)
    if fields.config.get("norm_topk_prob") is None:
        fields = fields.changed(norm_topk_prob=True)
    branches = _read_experts(fields, sizes, (512, 10))
    sparse = qwen3_moe.read_sparse(fields, sizes)
    return _read(fields, generation, sizes, branches, sparse, by_key_head=True)


def read_dense(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Qwen3.5 and 3.6 without experts."""
    return _read(fields, generation, _read_sizes(fields, kv_heads=4))


def read_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Qwen3.5 and 3.6 with experts in every layer."""
    fields.only("norm_topk_prob", True)
    size = fields.positive("moe_intermediate_size", 512)
    fields = fields.changed(norm_topk_prob=True, intermediate_size=size)
    sizes = _read_sizes(fields, kv_heads=2)
    branches = _read_experts(fields, sizes, (256, 8))
    return _read(fields, generation, sizes, branches, frozenset(range(sizes.layers)))


def _read_sizes(fields: Fields, kv_heads: int) -> ModelSizes:
    family.refuse_other_attention(fields)
    for key, usual in (("hidden_act", "silu"), ("is_causal", True)):
        fields.only(key, usual)
    fields.only("attn_output_gate", True)
    return family.read_sizes(fields, kv_heads=kv_heads, head_dim=_HEAD_DIM)


def _read_experts(
    fields: Fields, sizes: ModelSizes, usual: tuple[int, int]
) -> tuple[FeedForward, ...]:
    """Read routed experts, and the one that every token has. usual: counts of experts, and of those
    of a token, where `config.json` says nothing.
    """
    moe = routed.read_softmax(fields, sizes, usual, fields.positive("moe_intermediate_size", 512))
    size = fields.positive("shared_expert_intermediate_size", 512)
    return moe, experts.shared(sizes, size, "mlp.shared_expert", "mlp.shared_expert_gate")


def _read(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: ModelSizes,
    branches: tuple[FeedForward, ...] = (),
    sparse: frozenset[int] = frozenset(),
    *,
    by_key_head: bool = False,
) -> ModelSpec:
    """Read the model. branches: of layers in `sparse`; others have an MLP."""
    rope, max_context = read_rope(fields, sizes, _RULES)
    of = family.attention(sizes, rope, biases=family.attention_biases(fields), qk_norm=True)
    mixers: dict[str, Mixer] = {
        FULL: _gated(of),
        LINEAR: _read_delta(fields, sizes, by_key_head=by_key_head),
    }
    dense = (family.mlp(sizes),)
    layers = [
        _layer(sizes, mixers[kind], branches if number in sparse else dense)
        for number, kind in enumerate(_read_kinds(fields, sizes))
    ]
    eos = family.read_eos(fields, generation, sizes)
    model = family.model(fields, sizes, layers, max_context, eos)
    return replace(model, norm=_norm("model.norm", sizes.hidden, sizes))


def _read_kinds(fields: Fields, sizes: ModelSizes) -> list[str]:
    """The kind of each layer."""
    kinds = fields.config.get("layer_types")
    if kinds is None:
        interval = fields.positive("full_attention_interval", 4)
        kinds = [LINEAR if (n + 1) % interval else FULL for n in range(sizes.layers)]
    return family.read_mixed_kinds(fields, sizes, kinds, LINEAR)


def _norm(path: str, size: int, sizes: ModelSizes) -> NormSpec:
    return NormSpec(path, size, sizes.epsilon, offset=1.0)


def _layer(sizes: ModelSizes, mixer: Mixer, branches: tuple[FeedForward, ...]) -> LayerSpec:
    before, behind = (
        _norm(path, sizes.hidden, sizes) for path in ("input_layernorm", "post_attention_layernorm")
    )
    return LayerSpec((StepSpec((mixer,), before), StepSpec(branches, behind)))


def _gated(of: AttentionSpec) -> AttentionSpec:
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


def read_heads(fields: Fields, usual: tuple[int, int, int, int]) -> tuple[int, int, int, int, int]:
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


def _read_delta(fields: Fields, sizes: ModelSizes, *, by_key_head: bool) -> DeltaNetSpec:
    keys, values, key_dim, value_dim, kernel = read_heads(fields, (16, 32, 128, 128))
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
    out = Part(f"{PATH}.out_proj", sizes.hidden)
    return DeltaNetSpec(
        column("in", sizes, mixed),
        column("gates", sizes, gates),
        LinearSpec("out", values * value_dim, (out,), "row"),
        PATH,
        keys,
        values,
        key_dim,
        value_dim,
        kernel,
        sizes.epsilon,
        by_key_head,
    )


def column(role: Role, sizes: ModelSizes, parts: Mapping[str, tuple[Span, ...]]) -> LinearSpec:
    """Make a product of hidden states. parts: names of modules, and how devices share them."""
    made = (
        Part(f"{PATH}.{name}", sum(span.features for span in spans), spans)
        for name, spans in parts.items()
    )
    return LinearSpec(role, sizes.hidden, tuple(made), "column")
