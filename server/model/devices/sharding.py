"""The part of a model that each of several devices has. Pure."""

from msgspec.structs import replace

from loraplex.adapters.base import Shard, Span, heads_of, total_width
from loraplex.server.config import ConfigError
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    AttentionSpec,
    Branch,
    EmbeddingSpec,
    ModelSpec,
    NormSpec,
)
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.state_spec import DeltaNetSpec, Mamba2Spec, StateSpec

_MOST_SHARDS = 64


def sharded(model: ModelSpec, count: int, index: int = 0) -> ModelSpec:
    """The spec of one device's part, as large as every other. `vocab_size` stays that of the model.
    index: of the device, whose slopes the part has.

    Raises ConfigError where heads cannot be shared by so many, with the numbers that can.
    """
    check_shards(model, count)
    if count == 1:
        return model
    head = model.head
    return replace(
        model.mapped(lambda branch: _branch(branch, Shard(index, count))),
        embedding=_embedding(model.embedding, count),
        head=replace(head, linear=_linear(head.linear, count)),
    )


def check_shards(model: ModelSpec, count: int) -> None:
    """Check that so many devices can share the model. Raises ConfigError where they cannot."""
    served = shard_counts(model)
    if count not in served:
        attending = [
            f"{each.num_heads} heads and {each.num_kv_heads} key-value heads"
            for each in [*model.attentions.values()][:1]
        ]
        states = [
            f"{each.units} heads or channels with states"
            for each in {each for layer in model.layers for each in layer.branches}
            if isinstance(each, StateSpec)
        ]
        raise ConfigError(
            f"--tp {count}: the model's {' and '.join((*attending, *states))} can be shared by"
            f" {', '.join(map(str, served))} devices"
        )


def shard_counts(model: ModelSpec) -> tuple[int, ...]:
    """Numbers of devices that can share the model, 1 first."""
    if not model.is_decoder:  # small, and a score head is no table
        return (1,)
    heads = {_heads(attention) for attention in model.attentions.values()}
    branches = {branch for layer in model.layers for branch in layer.branches}
    if any(isinstance(each, MoeSpec) and each.latent for each in branches):
        return (1,)  # what lies behind experts has biases, and would add them on each device
    states = {branch for branch in branches if isinstance(branch, StateSpec)}
    units = {q.units for q, _ in heads} | {each.units for each in states}
    inputs = model.embedding.inputs
    size = 0 if inputs is None else inputs.size
    return tuple(
        n
        for n in range(1, min(_MOST_SHARDS, *units) + 1)
        if all(q.units % n == 0 and kv.divides(n) for q, kv in heads)
        and size % n == 0
        and all(each.divides(n) for each in states)
    )


def _heads(attention: AttentionSpec) -> tuple[Span, Span]:
    """Features of q, and of k or v."""
    head = attention.head_dim
    if isinstance(attention, LatentSpec):  # each device keeps the latent whole
        return Span(attention.q_size, attention.value_dim), Span(head, head)
    return Span(attention.q_size, head), Span(attention.kv_size, head)


def _embedding(embedding: EmbeddingSpec, count: int) -> EmbeddingSpec:
    inputs = embedding.inputs
    if inputs is not None:
        inputs = replace(inputs, devices=count)
    return replace(embedding, rows=Span(embedding.vocab_size).width(count), inputs=inputs)


def sharded_states(spec: StateSpec, count: int) -> StateSpec:
    """The spec of one device's part, as of `sharded`: heads or channels of states are cut."""
    mixed, out = _linear(spec.mixed, count), _linear(spec.out, count)
    if isinstance(spec, DeltaNetSpec):
        gates, keys = _linear(spec.gates, count), spec.key_heads // count
        values = spec.value_heads // count
        return replace(spec, mixed=mixed, gates=gates, out=out, key_heads=keys, value_heads=values)
    if isinstance(spec, Mamba2Spec):
        groups = spec.channel_spans[1].width(count) // spec.state
        return replace(spec, mixed=mixed, out=out, heads=spec.heads // count, groups=groups)
    return replace(spec, mixed=mixed, out=out, channels=spec.channels // count)


def _branch(branch: Branch, shard: Shard) -> Branch:
    count = shard.count
    if isinstance(branch, LatentSpec):
        q_b, kv_b, o = (_linear(linear, count) for linear in (branch.q_b, branch.kv_b, branch.o))
        return replace(branch, q_b=q_b, kv_b=kv_b, o=o, num_heads=branch.num_heads // count)
    if isinstance(branch, AttentionSpec):
        slopes = branch.slopes[heads_of(branch.num_heads, shard)]
        return replace(_attention(branch, count), slopes=slopes)
    if isinstance(branch, StateSpec):
        return sharded_states(branch, count)
    gate_up, down = (_linear(linear, count) for linear in (branch.gate_up, branch.down))
    return replace(branch, gate_up=gate_up, down=down)


def _attention(attention: AttentionSpec, count: int) -> AttentionSpec:
    head = attention.head_dim
    q, kv = (span.width(count) for span in _heads(attention))
    q_norm, k_norm = (
        _norm(norm, attention.norms_all_heads, size)
        for norm, size in ((attention.q_norm, q), (attention.k_norm, kv))
    )
    return replace(
        attention,
        qkv=_linear(attention.qkv, count),
        o=_linear(attention.o, count),
        gate=None if attention.gate is None else _linear(attention.gate, count),
        num_heads=q // head,
        num_kv_heads=kv // head,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _norm(norm: NormSpec | None, of_all_heads: bool, size: int) -> NormSpec | None:
    if norm is None or not (of_all_heads or norm.heads):
        return norm
    return replace(norm, size=size) if of_all_heads else replace(norm, heads=size // norm.size)


def _linear(linear: LinearSpec, count: int) -> LinearSpec:
    if linear.sharding == "none":
        return linear
    if linear.sharding == "row":
        return replace(linear, in_features=Span(linear.in_features).width(count))
    parts = tuple(
        Part(part.path, total_width(linear.spans_of(part), count)) for part in linear.parts
    )
    return replace(linear, parts=parts)
