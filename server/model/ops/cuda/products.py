"""The base's products in captured steps: of the ways to compute one, the fastest on this device.

With few rows a product is as fast as its weights arrive, and the libraries' own choice of kernel
is at times a tenth slower than another one that they have, or than ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs
from loraplex.server.kernels.linear.row_form import RoundedRows, Rounding
from loraplex.server.model.linear.dense import DEFAULT, Fixed, Library, Way
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.linear.rounded import RoundedLinear
from loraplex.server.model.ops.cuda.capture import record
from loraplex.server.model.ops.cuda.kept_choices import KeptChoices

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
