"""The base's products in captured steps: of the ways to compute one, the fastest on this device.

With few rows a product is as fast as its weights arrive, and the libraries' own choice of kernel
is at times a tenth slower than another one that they have.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

# Layers whose weights a measurement goes through, so that they come from memory as in a step.
_LAYERS = 8
_REPEATS = 4
# Cycles for which the device waits while the host queues the products, some 50 us each.
_HEAD_START = 1_000_000
# What another way must save to be taken.
_GAIN = 0.98


@dataclass(frozen=True, slots=True)
class Way:
    """library: whose choice of kernel. spare: multiprocessors that the kernel is to leave alone,
    which makes cuBLASLt choose other tiles."""

    library: Literal["cublas", "cublaslt"]
    spare: int = 0


DEFAULT = Way("cublas")
WAYS = (DEFAULT, *(Way("cublaslt", spare) for spare in (0, 8, 16, 32)))

# Rows, output features, input features.
_Shape = tuple[int, int, int]


def fastest(times: dict[Way, float]) -> Way:
    """times: of any unit, DEFAULT's among them: it is taken unless another is plainly faster."""
    best = min(times, key=lambda way: times[way])
    return best if times[best] < _GAIN * times[DEFAULT] else DEFAULT


class Products:
    """`x W^T + b`; in a graph each shape in the way that was fastest when it was measured."""

    def __init__(self) -> None:
        self._ways: dict[_Shape, Way] = {}

    def measure(self, sizes: Sequence[int], products: Sequence[Sequence[torch.Tensor]]) -> None:
        """sizes: numbers of rows. products: for each product of a step some layers' weights
        `[out, in]`. Some milliseconds for each of them; leaves no memory taken."""
        for size in sizes:
            for weights in products:
                out, features = weights[0].shape
                times = {way: _time(way, size, weights[:_LAYERS]) for way in WAYS}
                self._ways[size, out, features] = fastest(times)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: `[rows, in]`; weight `[out, in]`; bias `[out]`. out: where to write, `[rows, out]`."""
        way = DEFAULT
        if torch.cuda.is_current_stream_capturing():
            # Elsewhere cuBLASLt would look for its kernel anew in each call, on the host.
            way = self._ways.get((len(x), weight.shape[0], weight.shape[1]), DEFAULT)
        with _taken(way):
            if out is None:
                return functional.linear(x, weight, bias)
            if bias is None:
                return torch.mm(x, weight.T, out=out)
            return torch.addmm(bias, x, weight.T, out=out)


@contextmanager
def _taken(way: Way) -> Iterator[None]:
    """Both settings are the process's."""
    if way == DEFAULT:
        yield
        return
    torch.backends.cuda.preferred_blas_library(way.library)
    torch._C._set_sm_carveout_experimental(way.spare or None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(DEFAULT.library)


def _time(way: Way, rows: int, weights: Sequence[torch.Tensor]) -> float:
    """Milliseconds of the products with all weights, one after the other."""
    out, features = weights[0].shape
    x = torch.randn(rows, features, dtype=weights[0].dtype, device=weights[0].device)
    y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    times: list[float] = []
    with _taken(way):
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)
            begin.record()
            for weight in weights:
                torch.mm(x, weight.T, out=y)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return min(times)
