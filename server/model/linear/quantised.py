"""A quantised matrix of the base, and the ways to multiply with it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs, PackedConfig
from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.kernels.linear.split import split_of_codes, split_of_table
from loraplex.server.model.linear.dense import DEFAULT, DenseLinear, Product, Way
from loraplex.server.model.linear.packed import PackedWeight, unpacked

_LEAST_GROUP = 16
# The zero of int8 in codes of 8 bits, whose numbers differ in that bit.
_SIGN = 128
_LEAST_RUN, _MOST_RUN = 32, 128


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedLinear(Product):
    """Product with a quantised matrix: `x W^T + bias`. weight: as the kernels read it. bias:
    `[out_features]`. dtype: of x and what is computed.
    """

    weight: PackedMatrix
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def kind(self) -> tuple[object, ...]:
        """A key: for matrices of one kind each way takes the same time."""
        return (self.out_features, self.in_features, *self.weight.form())

    def ways(self, rows: int, configs: KernelConfigs) -> tuple[Way, ...]:
        """List the ways to compute a product of so many rows. DEFAULT writes the matrix out and
        takes the library's product.
        """
        return (DEFAULT, *configs.packed(rows))

    def outside_graphs(self, rows: int, configs: KernelConfigs) -> Way:
        """The way that needs no measurement."""
        return self.ways(rows, configs)[-1]

    def beside_lora(self, ways: Iterable[Way]) -> list[Way]:
        """Return the ways that may run at the same time as LoRA: all of them. To write the matrix
        out takes longer than LoRA waits for our kernels.
        """
        return list(ways)

    def run(
        self, x: torch.Tensor, out: torch.Tensor | None = None, way: Way = DEFAULT
    ) -> torch.Tensor:
        """Compute the product, as DenseLinear does."""
        if not isinstance(way, PackedConfig):
            return DenseLinear(self.dequantised(), self.bias).run(x, out, way)
        from loraplex.server.kernels.linear.packed_product import packed_product

        out = x.new_empty(len(x), self.out_features) if out is None else out
        packed_product(x, self.weight, self.bias, out, way)
        return out

    def operands(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make random operands of the product, x and out, for timing."""
        device = self.weight.numbers.device
        x = torch.randn(rows, self.in_features, dtype=self.dtype, device=device)
        return x, torch.empty(rows, self.out_features, dtype=self.dtype, device=device)

    def dequantised(self) -> torch.Tensor:
        """Write the matrix out as plain numbers, a new tensor at each call."""
        from loraplex.server.kernels.linear.dequantise import dequantise

        device = self.weight.numbers.device
        matrix = torch.empty(self.weight.shape, dtype=self.dtype, device=device)
        dequantise(self.weight, matrix, programmatic_launch=False)
        return matrix


def matrix_of(weight: PackedWeight) -> PackedMatrix | None:
    """Return the weight as the kernels read it. None where they do not: groups of other than powers
    of two, rows that end within a group.
    """
    inputs, group = weight.in_features, _group(weight.group, weight.in_features)
    if group is None:
        return None
    if weight.bits == 0:
        weight = weight if group else weight.by_row()
        weight = replace(weight, codes=weight.codes.view(torch.uint8))
    codes, run, zeros = weight.codes, 0, weight.zeros
    if weight.bits == 8 and isinstance(zeros, int) and zeros == _SIGN:
        codes, zeros = (codes ^ _SIGN).view(torch.int8), 0
    if weight.bits == 4:
        run = _MOST_RUN if group == 0 else min(_MOST_RUN, 2 * group)
        while group == 0 and inputs % run and run > _LEAST_RUN:
            run //= 2
        if inputs % run:
            return None
        codes = in_runs(codes, run)
    order = None if weight.order is None else weight.order.int()
    arrivals = torch.zeros(-(-len(codes) // 16), dtype=torch.int32, device=codes.device)
    of_matrix = (codes, weight.scales, arrivals, inputs, weight.bits, group, weight.rows)
    return PackedMatrix(*of_matrix, zeros, weight.table, order, run, _split(weight))


def _split(weight: PackedWeight) -> str:
    if weight.table is not None:
        values = weight.table.cpu().bfloat16().view(torch.uint8)
        return split_of_table(bytes(values.tolist()))
    if weight.bits != 4:
        return ""
    return split_of_codes(weight.zeros if isinstance(weight.zeros, int) else 8)


def in_runs(codes: torch.Tensor, run: int) -> torch.Tensor:
    """Order codes in runs: uint8 `[rows, n]`, two codes in a byte, in the order of PackedMatrix."""
    rows, width = codes.shape
    halves = unpacked(codes, 4).view(rows, -1, 2, run // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, width)


def _group(columns: int, in_features: int) -> int | None:
    """Inputs that share a scale, 0 = all; None = the kernels have no such group."""
    if columns >= in_features:
        return 0
    return columns if columns >= _LEAST_GROUP and columns.bit_count() == 1 else None
