"""A matrix of the base as the checkpoint stores it, and the ways to multiply with it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch.nn import functional

from loraplex.server.kernels.launch.configs import KernelConfigs, SkinnyConfig
from loraplex.server.kernels.linear.matrix import Weight


@dataclass(frozen=True, slots=True)
class Library:
    """Library whose kernel computes a product. name: whose choice of kernel. spare: multiprocessors
    that the kernel is to leave alone, which makes cuBLASLt choose other tiles.
    """

    name: Literal["cublas", "cublaslt"]
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """The kernel whose sums no number of rows changes. num_stages: of `fixed_product`."""

    num_stages: int


Way = Library | SkinnyConfig | Fixed
DEFAULT = Library("cublas")
LIBRARIES = (DEFAULT, *(Library("cublaslt", spare) for spare in (0, 8, 16, 32)))


class Product:
    """`x W^T + bias`, with a matrix of the base. weight: `[out_features, in_features]`, as it is
    stored on the device."""

    __slots__ = ()
    weight: Weight
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[-2]

    @property
    def in_features(self) -> int:
        return self.weight.shape[-1]

    @property
    def nbytes(self) -> int:
        """Size in bytes on the device."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear(Product):
    """Product with a plain matrix: `x W^T + bias`. weight: `[out_features, in_features]`; bias:
    `[out_features]`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """A key: for matrices of one kind each way takes the same time."""
        return self.weight.shape

    def ways(self, rows: int, configs: KernelConfigs) -> tuple[Way, ...]:
        """Ways to multiply `rows` rows of x on a GPU, DEFAULT first."""
        return (*LIBRARIES, *configs.skinny(rows))

    def outside_graphs(self, rows: int, configs: KernelConfigs) -> Way:
        """The way that needs no measurement: cuBLASLt would look for its kernel anew in each call,
        on the host."""
        return DEFAULT

    def beside_lora(self, ways: Iterable[Way]) -> list[Way]:
        """Ways among these that may run at the same time as LoRA.

        Our own kernel may not: its programs are many and short, and leave LoRA no room.
        """
        return [way for way in ways if isinstance(way, Library)]

    def run(
        self, x: torch.Tensor, out: torch.Tensor | None = None, way: Way = DEFAULT
    ) -> torch.Tensor:
        """Compute the product. x: `[rows, in_features]` -> `[rows, out_features]`, in `out` where
        that is given.
        """
        if isinstance(way, SkinnyConfig):
            # Not at the top: the CPU's operations need no Triton.
            from loraplex.server.kernels.linear.skinny import skinny_product

            out = x.new_empty(len(x), self.out_features) if out is None else out
            skinny_product(x, self.weight, self.bias, out, way)
            return out
        if isinstance(way, Fixed):
            from loraplex.server.kernels.linear.skinny import fixed_product

            out = x.new_empty(len(x), self.out_features) if out is None else out
            fixed_product(x, self.weight, self.bias, out, way.num_stages)
            return out
        if way == DEFAULT:
            return self._of_library(x, out)
        with _taken(way):
            return self._of_library(x, out)

    def _of_library(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            return functional.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(self.bias, x, self.weight.T, out=out)

    def operands(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A random input, and room for its product: `[rows, in_features]`, `[rows,
        out_features]`."""
        dtype, device = self.weight.dtype, self.weight.device
        x = torch.randn(rows, self.in_features, dtype=dtype, device=device)
        return x, torch.empty(rows, self.out_features, dtype=dtype, device=device)

    def dequantised(self) -> torch.Tensor:
        """The matrix `[out_features, in_features]` in the model's dtype."""
        return self.weight


@dataclass(frozen=True, slots=True, eq=False)
class ClippedLinear(DenseLinear):
    """Products side by side, each of which holds its inputs and outputs within bounds. heights:
    output features of each. bounds: `[products, 4]`, as of `LinearSpec.clips`."""

    heights: tuple[int, ...] = ()
    bounds: torch.Tensor | None = None

    def run(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        way: Way = DEFAULT,
        add: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Compute the products, as of DenseLinear. add: adds to one of them before its outputs are
        held, by its held inputs and `[rows, out_features]`, where the others are zeros."""
        assert self.bounds is not None
        found, ends = [], accumulate(self.heights)
        for height, end, bounds in zip(self.heights, ends, self.bounds, strict=True):
            low, high, least, most = bounds
            held, own = x.clamp(low, high), slice(end - height, end)
            y = functional.linear(held, self.weight[own])
            if add is not None:
                whole = functional.pad(y, (own.start, self.out_features - end))
                add(held, whole)
                y = whole[:, own]
            found.append(y.clamp(least, most))
        return torch.cat(found, dim=-1, out=out)


@contextmanager
def _taken(library: Library) -> Iterator[None]:
    """Let torch take this library, for a while. Both settings are the process's."""
    torch.backends.cuda.preferred_blas_library(library.name)
    torch._C._set_sm_carveout_experimental(library.spare or None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(DEFAULT.name)
