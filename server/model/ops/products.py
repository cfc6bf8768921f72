"""The base's products in captured steps: of the ways to compute one, the fastest on this device.

With few rows a product is as fast as its weights arrive, and the libraries' own choice of kernel
is at times a tenth slower than another one that they have, or than ours.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from server.kernels.launch.configs import KernelConfigs, SkinnyConfig
from server.kernels.linear.skinny import skinny_product
from server.model.ops.capture import record

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
class Library:
    """name: whose choice of kernel. spare: multiprocessors that the kernel is to leave alone,
    which makes cuBLASLt choose other tiles."""

    name: Literal["cublas", "cublaslt"]
    spare: int = 0


Way = Library | SkinnyConfig
Linear = tuple[torch.Tensor, torch.Tensor | None]  # weight `[out, in]`, bias `[out]`
DEFAULT = Library("cublas")
LIBRARIES = (DEFAULT, *(Library("cublaslt", spare) for spare in (0, 8, 16, 32)))


@dataclass(frozen=True, slots=True)
class _Choice:
    """beside: where LoRA runs at the same time."""

    alone: Way
    beside: Way


def fastest(times: dict[Way, float]) -> Way:
    """times: of any unit, DEFAULT's among them: it is taken unless another is plainly faster."""
    best = min(times, key=lambda way: times[way])
    return best if times[best] < _GAIN * times[DEFAULT] else DEFAULT


def choose(times: dict[Way, float]) -> _Choice:
    """As `fastest`. Beside LoRA our kernel, whose programs are many and short, leaves it no
    room."""
    libraries: dict[Way, float] = {w: t for w, t in times.items() if isinstance(w, Library)}
    return _Choice(fastest(times), fastest(libraries))


class Products:
    """`x W^T + b`; in a graph each shape in the way that was fastest when it was measured."""

    def __init__(self, configs: KernelConfigs) -> None:
        self._configs = configs
        # By rows, output features, input features.
        self._choices: dict[tuple[int, int, int], _Choice] = {}

    def launch_ours(self, sizes: Sequence[int], products: Sequence[Sequence[Linear]]) -> None:
        """Every kernel of ours that `measure` would try, once, with the first layer's weights."""
        for size in sizes:
            for way in self._configs.skinny(size):
                for (weight, bias), *_ in products:
                    x, y = _operands(size, weight)
                    _compute(way, x, weight, bias, y)

    def load(self, sizes: Sequence[int], products: Sequence[Linear]) -> None:
        """What products outside of graphs launch, once for each number of rows: at its first launch
        a kernel is loaded, for which host and device wait for each other, and the library has a
        hundred for one product."""
        for weight, bias in products:
            x, y = _operands(max(sizes), weight)
            for size in sizes:
                self.linear(x[:size], weight, bias, y[:size])
                if bias is not None:  # without a place for the result another function computes it
                    self.linear(x[:size], weight, bias)

    def measure(self, sizes: Sequence[int], products: Sequence[Sequence[Linear]]) -> None:
        """sizes: numbers of rows. products: for each product of a step that of some layers. Some
        milliseconds for each way of each; leaves no memory taken."""
        for size in sizes:
            ways: tuple[Way, ...] = (*LIBRARIES, *self._configs.skinny(size))
            for layers in products:
                measured = layers[: _LAYERS if size <= _MANY_ROWS else _LAYERS_OF_MANY]
                times = _times(ways, size, measured)
                self._choices[size, *layers[0][0].shape] = choose(times)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        beside_lora: bool = False,
    ) -> torch.Tensor:
        """x: `[rows, in]`; weight `[out, in]`; bias `[out]`. out: where to write, `[rows, out]`."""
        choice = self._choices.get((len(x), *weight.shape))
        # Outside of graphs cuBLASLt would look for its kernel anew in each call, on the host.
        if choice is None or not torch.cuda.is_current_stream_capturing():
            return _compute(DEFAULT, x, weight, bias, out)
        return _compute(choice.beside if beside_lora else choice.alone, x, weight, bias, out)


def _compute(
    way: Way,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if isinstance(way, SkinnyConfig):
        out = x.new_empty(len(x), len(weight)) if out is None else out
        skinny_product(x, weight, bias, out, way)
        return out
    with _taken(way):
        if out is None:
            return functional.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.T, out=out)
        return torch.addmm(bias, x, weight.T, out=out)


@contextmanager
def _taken(library: Library) -> Iterator[None]:
    """Both settings are the process's."""
    if library == DEFAULT:
        yield
        return
    torch.backends.cuda.preferred_blas_library(library.name)
    torch._C._set_sm_carveout_experimental(library.spare or None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(DEFAULT.name)


def _times(ways: Sequence[Way], rows: int, layers: Sequence[Linear]) -> dict[Way, float]:
    """Milliseconds of the products of all layers, one after the other in a graph, the least of some
    repeats."""
    x, y = _operands(rows, layers[0][0])
    pool = torch.cuda.graph_pool_handle()

    def recorded(way: Way) -> torch.cuda.CUDAGraph:
        def step() -> None:
            for weight, bias in layers:
                _compute(way, x, weight, bias, y)

        _compute(way, x, *layers[0], y)  # a capture can load no kernel
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


def _operands(rows: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A random input, and where its product is to lie."""
    out, features = weight.shape
    x = torch.randn(rows, features, dtype=weight.dtype, device=weight.device)
    return x, torch.empty(rows, out, dtype=x.dtype, device=x.device)
