"""A linear of the base with its adapters' LoRA, by the strategy of its site and regime; and the
base's product in captured steps, of the ways to compute one the fastest on this device.

With few rows a product is as fast as its weights arrive, and the libraries' own choice of kernel is
at times a tenth slower than another one that they have, or than ours.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs, Phase
from loraplex.server.kernels.linear.row_form import RoundedRows, Rounding
from loraplex.server.kernels.linear.skinny_lora import SkinnyLora, skinny_product_lora
from loraplex.server.kernels.lora.expand import expand, scale_outputs
from loraplex.server.kernels.lora.pending import PendingDelta, PendingLora
from loraplex.server.kernels.lora.shrink import gather_embedding, shrink
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.workspace import Workspace
from loraplex.server.kernels.pointwise.add_norm import ExpertTerms
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.model.linear.dense import DEFAULT, DenseLinear, Fixed, Library, Way
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.linear.quantised import RoundedLinear
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.cuda.capture import record
from loraplex.server.model.ops.cuda.device_lora import DeviceLora
from loraplex.server.model.ops.cuda.kept_choices import KeptChoices
from loraplex.server.model.ops.cuda.lora_strategy import Strategy
from loraplex.server.model.ops.products_torch import wide_logits

# Layers that a measurement goes through. With few rows weights are to come from memory as in a
# step, and kernels to follow each other; with many neither counts, and each takes longer.
_LAYERS, _LAYERS_OF_MANY = 8, 2
_MANY_ROWS = 256
_REPEATS = 4
# Cycles for which the device waits while the host queues what it is to time, some 20 us a graph.
_HEAD_START = 2_000_000
# What another way must save to be taken.
_GAIN = 0.98


@dataclass(frozen=True, slots=True)
class _Choice:
    """Chosen ways to compute one product. beside: where LoRA runs at the same time."""

    alone: Way
    beside: Way


def fastest(times: dict[Way, float]) -> Way:
    """Return the fastest way. times: of any unit, DEFAULT's among them: it is taken unless another
    is plainly faster.
    """
    best = min(times, key=lambda way: times[way])
    return best if times[best] < _GAIN * times[DEFAULT] else DEFAULT


def choose(times: dict[Way, float], linear: Linear) -> _Choice:
    """Choose the fastest ways to compute the product: alone, and while LoRA runs. times: of
    `linear`, as for `fastest`.
    """
    beside = {way: times[way] for way in linear.beside_lora(times)}
    return _Choice(fastest(times), fastest(beside))


class Products:
    """Compute products, each by the fastest way that was measured: `x W^T + b`; in a graph each
    shape in the way that was fastest when it was measured.
    """

    def __init__(self, configs: KernelConfigs, fixed: Fixed | None = None) -> None:
        """Begin without measurements. fixed: the one way of all products; None = the fastest."""
        self._configs, self._fixed = configs, fixed
        # The last rows whose rounding was noted.
        self._latest: tuple[torch.Tensor | None, Rounding | None] = (None, None)
        # By rows and kind of matrix.
        self._choices: dict[tuple[int, tuple[object, ...]], _Choice] = {}

    def launch_ours(self, sizes: Sequence[int], products: Sequence[Sequence[Linear]]) -> None:
        """Launch each of this package's kernels that `measure` would try, once, with the first
        layer's weights.
        """
        for size in sizes:
            for linear, *_ in products:
                for way in linear.ways(size, self._configs):
                    if not isinstance(way, Library):
                        x, y = linear.operands(size)
                        _run(linear, self._inputs(x, linear), y, way)

    def load(self, sizes: Sequence[int], products: Sequence[Linear]) -> None:
        """Launch what products outside of graphs launch, once for each number of rows.

        A kernel is loaded at its first launch, for which host and device wait for each other. The
        library has a hundred kernels for one product.
        """
        for linear in products:
            x, y = linear.operands(max(sizes))
            for size in sizes:
                self.linear(x[:size], linear, y[:size])
                if linear.bias is not None:  # without `out` another function computes it
                    self.linear(x[:size], linear)

    def measure(
        self,
        sizes: Sequence[int],
        products: Sequence[Sequence[Linear]],
        kept: KeptChoices | None = None,
    ) -> None:
        """Choose the fastest ways of the products, by time where no choice is kept. sizes: numbers
        of rows. products: for each product of a step that of some layers. Some milliseconds for
        each way of each; leaves no memory taken.
        """
        if self._fixed is not None:
            return
        for size in sizes:
            for layers in products:
                kind, ways = layers[0].kind, layers[0].ways(size, self._configs)
                choice = None if kept is None else _named(kept.find(size, kind), ways)
                if choice is None:
                    choice = self._measured(size, layers, ways)
                    if kept is not None:
                        kept.keep(size, kind, [repr(choice.alone), repr(choice.beside)])
                self._choices[size, kind] = choice

    def _measured(self, size: int, layers: Sequence[Linear], ways: Sequence[Way]) -> _Choice:
        measured = layers[: _LAYERS if size <= _MANY_ROWS else _LAYERS_OF_MANY]
        x, y = measured[0].operands(size)
        times = _times(ways, (self._inputs(x, measured[0]), y), measured)
        return choose(times, layers[0])

    def linear(
        self,
        x: torch.Tensor,
        linear: Linear,
        out: torch.Tensor | None = None,
        *,
        beside_lora: bool = False,
    ) -> torch.Tensor:
        """Compute a product by the way that was chosen. x: `[rows, in_features]`. out: where to
        write, `[rows, out_features]`.
        """
        choice, inputs = None, self._inputs(x, linear)
        if self._fixed is not None:
            return _run(linear, inputs, out, self._fixed)
        if torch.cuda.is_current_stream_capturing():
            choice = self._choices.get((len(x), linear.kind))
        if choice is None:
            return _run(linear, inputs, out, linear.outside_graphs(len(x), self._configs))
        return _run(linear, inputs, out, choice.beside if beside_lora else choice.alone)

    def note(self, x: torch.Tensor, rounding: Rounding | None) -> None:
        """Keep the rounded rows that the next products are of, and their form. None: x has none."""
        self._latest = (x, rounding)

    def _inputs(self, x: torch.Tensor, linear: Linear) -> torch.Tensor | RoundedRows:
        """Operands of a product: x, or x rounded, which its writer may have left."""
        if not isinstance(linear, RoundedLinear):
            return x
        noted, rounding = self._latest
        if (
            x is noted
            and rounding is not None
            and rounding[1] == linear.form
            and linear.multiplies_rounded
        ):
            return rounding[0]
        return linear.inputs(x, self._configs)


def _named(names: Sequence[str], ways: Sequence[Way]) -> _Choice | None:
    """The choice of that name; None where a name is no way's."""
    found = [way for name in names for way in ways if repr(way) == name]
    return _Choice(*found) if len(found) == 2 else None


def _run(
    linear: Linear, x: torch.Tensor | RoundedRows, out: torch.Tensor | None, way: Way
) -> torch.Tensor:
    if isinstance(linear, RoundedLinear):
        return linear.run(x, out, way)
    if isinstance(x, RoundedRows):
        raise TypeError("rounded rows, and a product of others")
    return linear.run(x, out, way)


def _times(
    ways: Sequence[Way],
    operands: tuple[torch.Tensor | RoundedRows, torch.Tensor],
    layers: Sequence[Linear],
) -> dict[Way, float]:
    """Milliseconds of the products of all layers, one after the other in a graph, the least of some
    repeats. operands: x and out."""
    x, y = operands
    pool = torch.cuda.graph_pool_handle()

    def recorded(way: Way) -> torch.cuda.CUDAGraph:
        def step() -> None:
            for linear in layers:
                _run(linear, x, y, way)

        _run(layers[0], x, y, way)  # a capture can load no kernel
        return record(step, pool)

    graphs = [recorded(way) for way in ways]
    torch.cuda._sleep(_HEAD_START)
    # Ways in turn, as the clock changes; the first replay of a graph takes longer.
    rounds = [[_replayed(graph) for graph in graphs] for _ in range(1 + _REPEATS)][1:]
    torch.cuda.synchronize()
    by_way = zip(ways, zip(*rounds, strict=True), strict=True)
    return {way: min(begin.elapsed_time(end) for begin, end in of) for way, of in by_way}


def _replayed(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    return begin, end


@dataclass(frozen=True, slots=True)
class Ready:
    """Product that is complete. y: `[tokens, out]`, complete."""

    y: torch.Tensor


@dataclass(frozen=True, slots=True)
class WithDelta:
    """Product whose LoRA is still to be added. y: `[tokens, out]` of the base; delta: what its
    consumer adds.
    """

    y: torch.Tensor
    delta: PendingDelta


@dataclass(frozen=True, slots=True)
class Unsummed:
    """Product that is still to be summed over devices. y: `[tokens, out]`, this device's term of a
    sum; delta: as in WithDelta, of all devices; None = LoRA is in y. terms: of all devices,
    which the consumer sums.
    """

    y: torch.Tensor
    delta: PendingDelta | None
    terms: SharedTerms


@dataclass(frozen=True, slots=True)
class Deferred:
    """Product whose LoRA is still to be expanded. y: `[tokens, out]` of the base; lora: what its
    consumer expands, with launch parameters of this phase. shrunk: where the consumer leaves its
    result shrunk for the next site; None = nowhere.
    """

    y: torch.Tensor
    lora: PendingLora
    phase: Phase
    shrunk: Workspace | None = None


@dataclass(frozen=True, slots=True)
class ByExperts:
    """Product of experts that is still to be summed. y, weights, beside: results, weights and
    beside of `ExpertTerms`, which its consumer sums.
    """

    y: torch.Tensor
    weights: torch.Tensor
    beside: torch.Tensor | None = None

    @property
    def terms(self) -> ExpertTerms:
        return ExpertTerms(self.y, self.weights, self.beside)


# What a linear, or a layer's experts, leave to the operation that takes the output.
LinearOutput = Ready | WithDelta | Unsummed | Deferred | ByExperts


class Gemm(NamedTuple):
    """Operands of a product. x: `[tokens, in]`; y: `[tokens, out]`, which the linear of x is
    written to.
    """

    x: torch.Tensor
    linear: Linear
    y: torch.Tensor


class LoraLinear:
    """Compute products with LoRA. Owns the stream on which one runs beside the other."""

    def __init__(
        self, configs: KernelConfigs, table: LoraTable, products: Products, device: torch.device
    ) -> None:
        self._configs, self._table, self._products = configs, table, products
        self._side = torch.cuda.Stream(device)

    def run(
        self, gemm: Gemm, lora: DeviceLora, site: Site, delta: torch.Tensor | None = None
    ) -> LinearOutput:
        """The base's linear, with its LoRA or with what is left of that. delta: where a delta is to
        lie, as gemm.y; None: anywhere."""
        match lora.strategies[site.role]:
            case Strategy.FUSED:
                return self._fused(gemm, lora, site)
            case Strategy.DELTA:
                return self._delta(gemm, lora, site, delta)
            case Strategy.DELTA_OF_SHRUNK:
                return self._delta(gemm, lora, site, None, _down(lora))
            case Strategy.IN_PLACE:
                return self._in_place(gemm, lora, site)
            case Strategy.DEFER:
                return Deferred(gemm.y, self._deferred(gemm, lora, site), lora.phase)
            case Strategy.DEFER_AND_SHRINK_NEXT:
                pending = self._deferred(gemm, lora, site)
                return Deferred(gemm.y, pending, lora.phase, _down(lora))
            case strategy:
                assert_never(strategy)

    def add(self, x: torch.Tensor, y: torch.Tensor, lora: DeviceLora, site: Site) -> None:
        """Shrink and expand in line: `y += scale * B (A x)`, for the head."""
        _scale(y, lora, site)
        self._shrink(x, lora, site, after_input=False)
        self._expand(y, lora, site, lora.workspace, accumulate=True)

    def router(
        self, x: torch.Tensor, router: DenseLinear, lora: DeviceLora, site: Site
    ) -> torch.Tensor:
        """A router's logits with LoRA in float32: `[tokens, in]` -> `[tokens, experts]`."""
        if lora.strategies[site.role] is Strategy.FUSED:
            y = x.new_empty(len(x), router.out_features, dtype=torch.float32)
            return self._fused(Gemm(x, router, y), lora, site).y
        y = wide_logits(x, router)
        found = torch.zeros(y.shape, dtype=x.dtype, device=x.device)
        _scale(y, lora, site)
        self._shrink(x, lora, site, after_input=False)
        self._expand(found, lora, site, lora.workspace, accumulate=True)
        return y + found

    def add_embedding(
        self, token_ids: torch.Tensor, y: torch.Tensor, lora: DeviceLora, site: Site
    ) -> None:
        """Add LoRA to the embedding of token_ids, int `[tokens]`."""
        _scale(y, lora, site)
        ids = token_ids.to(torch.int32)
        gather_embedding(ids, self._table, site.number, lora.segments, lora.workspace)
        self._expand(y, lora, site, lora.workspace, accumulate=True)

    # ---- strategies

    def _fused(self, gemm: Gemm, lora: DeviceLora, site: Site) -> Ready:
        kernel, base = lora.kernel, gemm.linear
        if kernel is None:
            raise TypeError("a batch without a fused kernel")
        if not isinstance(base, DenseLinear):
            raise TypeError("quantised linears have no kernel with LoRA in it")
        low_rank = SkinnyLora(
            self._table, site.number, lora.slots, site.out_features, lora.workspace, kernel.stack
        )
        skinny_product_lora(gemm.x, base.weight, base.bias, gemm.y, kernel.config, low_rank)
        return Ready(gemm.y)

    def _delta(
        self,
        gemm: Gemm,
        lora: DeviceLora,
        site: Site,
        delta: torch.Tensor | None,
        shrunk: Workspace | None = None,
    ) -> WithDelta:
        """shrunk: what the activation before has left; None = shrink comes first."""
        with self._beside(gemm, lora, site):
            if shrunk is None:
                self._shrink(gemm.x, lora, site, after_input=lora.phase != "prefill")
            delta = torch.empty_like(gemm.y) if delta is None else delta
            self._expand(delta, lora, site, shrunk or lora.workspace, accumulate=False)
        return WithDelta(gemm.y, PendingDelta(self._table, site.number, lora.slots, delta))

    def _in_place(self, gemm: Gemm, lora: DeviceLora, site: Site) -> Ready:
        pending = self._deferred(gemm, lora, site)
        self._expand(gemm.y, lora, site, pending.workspace, accumulate=True)
        return Ready(gemm.y)

    def _deferred(self, gemm: Gemm, lora: DeviceLora, site: Site) -> PendingLora:
        """Shrink beside the linear; expand is to come."""
        with self._beside(gemm, lora, site):
            self._shrink(gemm.x, lora, site, after_input=lora.phase != "prefill")
        return PendingLora(self._table, site.number, lora.segments, lora.workspace)

    # ---- kernels and streams

    @contextmanager
    def _beside(self, gemm: Gemm, lora: DeviceLora, site: Site) -> Iterator[None]:
        """Launches the linear beside what the body launches, which comes first. The current stream
        goes on when both are done; also after an error, because the next step must not get memory
        that the other stream still reads.

        In a captured step LoRA has the current stream, so that shrink starts while the kernel that
        wrote x drains. In prefill, which the host launches, the linear has the current stream, so
        that its consumer starts sooner.
        """
        main, side = torch.cuda.current_stream(), self._side
        of_lora, of_linear = (side, main) if lora.phase == "prefill" else (main, side)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(of_lora):
                yield
            with torch.cuda.stream(of_linear):
                self._products.linear(*gemm, beside_lora=True)
                _scale(gemm.y, lora, site)
        finally:
            main.wait_stream(side)

    def _shrink(self, x: torch.Tensor, lora: DeviceLora, site: Site, *, after_input: bool) -> None:
        config = self._configs.shrink(lora.phase, len(x))
        context = (self._table, site.number, lora.segments, lora.workspace, config)
        shrink(x, *context, after_input=after_input)

    def _expand(
        self, y: torch.Tensor, lora: DeviceLora, site: Site, shrunk: Workspace, *, accumulate: bool
    ) -> None:
        """Expand the shrunk rows into y. shrunk: what the site's shrink left."""
        config = self._configs.expand(lora.phase, len(y))
        context = (self._table, site.number, lora.segments, shrunk, config)
        expand(y, site.out_features, *context, accumulate=accumulate, after_gemm=True)


def _scale(y: torch.Tensor, lora: DeviceLora, site: Site) -> None:
    """Apply the adapters' factors and biases to the base's own product y."""
    if lora.vectors is not None:
        scale_outputs(y, lora.slots, lora.vectors, site.number)


def _down(lora: DeviceLora) -> Workspace:
    if lora.down is None:
        raise TypeError("a batch whose activation does not shrink")
    return lora.down
