"""Where each linear's LoRA is computed: one table by the regime of the batch and the role.

A linear's *consumer* is the operation that takes its output: attention takes qkv, the residual norm
takes o and down, the activation takes gate_up. A consumer can do a part of LoRA at little cost,
because it reads the whole output in any case.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from loraplex.adapters.base import Role
from loraplex.server.kernels.launch.configs import Phase
from loraplex.server.model.spec.model_spec import (
    FUSED_ACTIVATIONS,
    AttentionSpec,
    MlpSpec,
    ModelSpec,
)
from loraplex.server.model.spec.moe_spec import FeedForwardSpec

# Up to so many tokens a delta of gate_up beside its linear costs less than expanding in the
# activation, and tiles are shared out among programs.
FEW_TOKENS = 256
# Up to so many tokens shrink splits its inputs, and the activation alone expands.
MIXED_TOKENS = 2048


class Strategy(Enum):
    """How one linear's LoRA is computed.

    FUSED: in the linear's own kernel.
    DELTA: shrink and expand run beside the linear, and the consumer adds their delta.
    DELTA_OF_SHRUNK: as DELTA without the shrink, which the activation before has done.
    IN_PLACE: shrink runs beside the linear, and expand then adds to its output.
    DEFER: shrink runs beside the linear, and the consumer expands.
    DEFER_AND_SHRINK_NEXT: as DEFER, and the consumer also shrinks its result for the next site.
    """

    FUSED = auto()
    DELTA = auto()
    DELTA_OF_SHRUNK = auto()
    IN_PLACE = auto()
    DEFER = auto()
    DEFER_AND_SHRINK_NEXT = auto()


class Regime(Enum):
    """The kind of a batch.

    FUSED: so few tokens that linears have kernels with LoRA in them.

    FEW_DECODES, MANY_DECODES: every token is a decode, up to FEW_TOKENS and beyond.

    FEW_TOKENS: some tokens may be of prompts, up to FEW_TOKENS.

    MIXED: up to MIXED_TOKENS. PREFILL: more.

    CAPTURED_PREFILL: more, in a graph, which may have decodes at any place.

    SHRINKING_PREFILL: more, and all ranks of the adapters fit one block.
    """

    FUSED = auto()
    FEW_DECODES = auto()
    MANY_DECODES = auto()
    FEW_TOKENS = auto()
    MIXED = auto()
    PREFILL = auto()
    CAPTURED_PREFILL = auto()
    SHRINKING_PREFILL = auto()


Strategies = MappingProxyType[Role, Strategy]


# Roles whose consumer finishes no LoRA.
_COMPLETE: tuple[Role, ...] = (
    *("up", "in", "gates", "out", "shared_gate_up", "shared_down"),
    *("shared_out_gate", "router", "latent_in", "latent_out", "wide_qkv", "wide_o", "q", "wide_q"),
    *("wide_gate_up", "wide_down", "layer_gate", "layer_out", "per_layer_model_projection"),
    *("project_in", "project_out", "distances", "q_a", "q_b", "kv_a", "kv_b"),
)


def _row(qkv: Strategy, o: Strategy, gate_up: Strategy, down: Strategy) -> Strategies:
    others = Strategy.FUSED if qkv is Strategy.FUSED else Strategy.IN_PLACE
    of_each = dict.fromkeys(_COMPLETE, others)
    return MappingProxyType(of_each | {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down})


_S = Strategy
STRATEGIES: MappingProxyType[Regime, Strategies] = MappingProxyType(
    {
        Regime.FUSED: _row(_S.FUSED, _S.FUSED, _S.FUSED, _S.FUSED),
        # The attention of decodes adds a delta; that of prompts does not.
        Regime.FEW_DECODES: _row(_S.DELTA, _S.DELTA, _S.DELTA, _S.DELTA),
        Regime.MANY_DECODES: _row(_S.DELTA, _S.DELTA, _S.DEFER, _S.DELTA),
        # With few tokens the rotation would need longer to expand than expand itself.
        Regime.FEW_TOKENS: _row(_S.IN_PLACE, _S.DELTA, _S.DELTA, _S.DELTA),
        Regime.MIXED: _row(_S.IN_PLACE, _S.DELTA, _S.DEFER, _S.DELTA),
        Regime.PREFILL: _row(_S.DEFER, _S.DELTA, _S.DEFER, _S.DELTA),
        # The rotation in a graph does not know which rows are decodes.
        Regime.CAPTURED_PREFILL: _row(_S.IN_PLACE, _S.DELTA, _S.DEFER, _S.DELTA),
        Regime.SHRINKING_PREFILL: _row(
            _S.DEFER, _S.DELTA, _S.DEFER_AND_SHRINK_NEXT, _S.DELTA_OF_SHRUNK
        ),
    }
)


class SummedSites(NamedTuple):
    """Sites whose output devices sum or norm together. before: they do so before the consumer takes
    it. late: that of more than term_rows tokens; up to so many the consumer sums."""

    before: frozenset[Role] = frozenset()
    late: frozenset[Role] = frozenset()
    term_rows: int = 0


NONE_SUMMED = SummedSites()


@dataclass(frozen=True, slots=True)
class Consumers:
    """Reasons that keep a model's consumers from a part of LoRA.

    whole: sites of one module, of whose output the consumer takes parts: kernels finish LoRA by the
    ranks of each part; sites whose activation no kernel computes; queries with gates, bounds or
    LayerNorms; and sites of branches that are summed with others. summed: LoRA is complete before
    devices sum. sums_first: the rotation expands nothing, since norms of values, or of q and k over
    all heads, need the sum before, since it would write to a cache of another dtype, or since there
    are no pages. fused: linears of few tokens have a kernel with LoRA in it; quantised ones end
    before A x would be there. share_tiles: those of few tokens are shared out among programs.
    """

    whole: frozenset[Role] = frozenset()
    summed: SummedSites = NONE_SUMMED
    sums_first: bool = False
    fused: bool = True
    share_tiles: bool = True

    @classmethod
    def of(cls, model: ModelSpec, *, rounded_cache: bool, summed: SummedSites) -> "Consumers":
        branches = {branch for layer in model.layers for branch in layer.branches}
        attentions = [branch for branch in branches if isinstance(branch, AttentionSpec)]
        feeds = [branch for branch in branches if isinstance(branch, FeedForwardSpec)]
        takes_parts = {of.qkv for of in attentions} | {of.gate_up for of in feeds}
        whole = {linear.role for linear in takes_parts if len(linear.parts) == 1}
        whole |= {of.qkv.role for of in attentions if of.is_gated or of.clip or of.has_layer_norms}
        whole |= {
            branch.gate_up.role
            for branch in branches
            if isinstance(branch, MlpSpec)
            and (branch.activation not in FUSED_ACTIVATIONS or branch.gate_factor != 1.0)
        }
        for step in set(model.steps):
            if len(step.branches) > 1:
                whole |= {branch.linears[-1].role for branch in step.branches}
        plain = (of for of in branches if isinstance(of, MlpSpec) and not of.is_gated)
        if any(mlp.down.role == "down" for mlp in plain):
            whole.add("gate_up")  # no activation shrinks for down
        sums_first = any(of.norms_all_heads or of.norms_values for of in attentions)
        sums_first = sums_first or not model.is_causal or rounded_cache
        fused = model.quantisation is None
        return cls(frozenset(whole), summed, sums_first, fused=fused)

    def of_one_way(self) -> "Consumers":
        """The same consumers, where LoRA is added in place whatever the regime, and tiles are not
        shared out: all batches sum and round alike."""
        every = frozenset(STRATEGIES[Regime.FUSED])
        return replace(self, whole=every, fused=False, share_tiles=False)

    def strategies(self, regime: Regime, tokens: int, *, norms: bool = False) -> Strategies:
        """The row of STRATEGIES, with IN_PLACE for what a consumer cannot finish. norms: adapters
        may have norms of q and k of their own, which need the sum before."""
        row = dict(STRATEGIES[regime])
        if (self.sums_first or norms) and row["qkv"] is Strategy.DEFER:
            row["qkv"] = Strategy.IN_PLACE
        summed = self.summed
        late = frozenset[Role]() if tokens <= summed.term_rows else summed.late
        for role in (self.whole | summed.before | late) & row.keys():
            if row[role] is not Strategy.FUSED:
                row[role] = Strategy.IN_PLACE
        if row["gate_up"] is Strategy.IN_PLACE and row["down"] is Strategy.DELTA_OF_SHRUNK:
            row["down"] = Strategy.DELTA
        if row["gate_up"] is Strategy.DEFER_AND_SHRINK_NEXT and row["down"] is Strategy.IN_PLACE:
            row["gate_up"] = Strategy.DEFER
        return MappingProxyType(row)


def regime_of(tokens: int, *, decodes: bool, captured: bool) -> Regime:
    """The regime of a batch that no fused kernel takes, before its adapters' ranks are known.

    decodes: every token is a decode. captured: the batch is of a graph.
    """
    if decodes:
        return Regime.FEW_DECODES if tokens <= FEW_TOKENS else Regime.MANY_DECODES
    if tokens <= FEW_TOKENS:
        return Regime.FEW_TOKENS
    if tokens <= MIXED_TOKENS:
        return Regime.MIXED
    return Regime.CAPTURED_PREFILL if captured else Regime.PREFILL


def phase_of(tokens: int, *, decodes: bool) -> Phase:
    """Return the phase whose launch parameters apply. In few tokens, and in decodes, each row may
    have an adapter of its own.
    """
    if tokens > MIXED_TOKENS:
        return "prefill"
    return "decode" if decodes or tokens <= FEW_TOKENS else "mixed"


def shares_tiles(tokens: int) -> bool:
    """Whether tiles are shared out among programs. An activation that expands takes whole tiles."""
    return tokens <= FEW_TOKENS
