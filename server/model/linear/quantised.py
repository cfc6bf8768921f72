"""Quantised matrices of the base, and the ways to multiply with them; the inputs of some have eight
bits."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs, PackedConfig
from loraplex.server.kernels.linear.matrix import PackedMatrix, split_of_codes, split_of_table
from loraplex.server.kernels.linear.row_form import FP8, INT8, RoundedRows, RowForm, rounded
from loraplex.server.model.linear.dense import DEFAULT, DenseLinear, Product, Way
from loraplex.server.model.linear.packed import PackedWeight, unpacked
from loraplex.server.model.quantisation.forms import InputForm

_LEAST_GROUP = 16
# The zero of int8 in codes of 8 bits, whose numbers differ in that bit.
_SIGN = 128
_LEAST_RUN, _MOST_RUN = 32, 128

# Columns of which an activation's program has some power of two: groups must be whole there.
_MOST_GROUP = 1024
# What the library takes: multiples of so many features, and in blocks of so many rows and columns
# of so many tokens. It reads scales of blocks in rows of multiples of four, whatever it is given.
_ALIGNED, _BLOCKS, _SCALES = 16, (128, 128), 4
# For products of any number of rows that the library has not: FP8 of odd shapes, and int8.
_OF_ODD_SHAPES = PackedConfig(64, 128, 4, 4, programmatic_launch=False)
_OF_INT8 = PackedConfig(128, 128, 8, 3, programmatic_launch=False)


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
        from loraplex.server.kernels.linear.few_rows import packed_product

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
        from loraplex.server.kernels.linear.packed import dequantise

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


@dataclass(frozen=True, slots=True, eq=False)
class RoundedLinear:
    """Product with a matrix whose inputs are rounded to FP8 or int8: `rounded(x) W^T + bias`.

    base: the matrix. form: how inputs are rounded.
    """

    base: DenseLinear | QuantisedLinear
    form: RowForm

    @property
    def weight(self) -> torch.Tensor | PackedMatrix:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    @property
    def out_features(self) -> int:
        return self.base.out_features

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def nbytes(self) -> int:
        """Size in bytes on the device."""
        return self.base.nbytes

    @property
    def kind(self) -> tuple[object, ...]:
        """A key: for matrices of one kind each way takes the same time."""
        return ("rounded", *self.base.kind)

    @property
    def multiplies_rounded(self) -> bool:
        """Whether rounded inputs are multiplied as they are. Else they become x's dtype again."""
        return self._matrix is not None

    @property
    def _matrix(self) -> PackedMatrix | None:
        """The matrix, where rounded inputs are multiplied as they are."""
        matrix = self.base.weight
        if not isinstance(matrix, PackedMatrix) or matrix.order is not None:
            return None
        fits = (matrix.rounded_dtype, matrix.group) == (self.form.dtype, self.form.group)
        return matrix if fits else None

    def ways(self, rows: int, configs: KernelConfigs) -> tuple[Way, ...]:
        """List the ways to compute a product of so many rows, DEFAULT first: the library's."""
        if not self.multiplies_rounded:
            return self.base.ways(rows, configs)
        return (DEFAULT, *configs.rounded(rows))

    def outside_graphs(self, rows: int, configs: KernelConfigs) -> Way:
        """The way that needs no measurement."""
        if not self.multiplies_rounded:
            return self.base.outside_graphs(rows, configs)
        ours = configs.rounded(rows)
        return ours[0] if ours else DEFAULT

    def beside_lora(self, ways: Iterable[Way]) -> list[Way]:
        """Return the ways that may run at the same time as LoRA."""
        return self.base.beside_lora(ways)

    def inputs(self, x: torch.Tensor, configs: KernelConfigs) -> torch.Tensor | RoundedRows:
        """Make the operand that `run` multiplies at once."""
        if not self.multiplies_rounded:
            return x
        from loraplex.server.kernels.linear.round_rows import quantise_rows

        return quantise_rows(x, self.form, programmatic_launch=configs.programmatic_launch)

    def run(
        self, x: torch.Tensor | RoundedRows, out: torch.Tensor | None = None, way: Way = DEFAULT
    ) -> torch.Tensor:
        """The product: `[rows, in_features]`, or these rounded -> `[rows, out_features]`."""
        if isinstance(x, torch.Tensor):
            return self.base.run(rounded(x, self.form), out, way)
        matrix = self._matrix
        if matrix is None or not isinstance(self.base, QuantisedLinear):
            raise TypeError("rounded rows, and a matrix that is not of their kind")
        if out is None:
            out = x.scales.new_empty(len(x), self.out_features, dtype=self.base.dtype)
        if not isinstance(way, PackedConfig) and self._fits_library(matrix, out):
            return self._of_library(x, matrix, out)
        from loraplex.server.kernels.linear.few_rows import rounded_product

        usual = _OF_ODD_SHAPES if self.form.dtype == FP8 else _OF_INT8
        ours = way if isinstance(way, PackedConfig) else usual
        rounded_product(x, matrix, self.bias, out, ours)
        return out

    def _fits_library(self, matrix: PackedMatrix, out: torch.Tensor) -> bool:
        aligned = matrix.bits == 0 and all(size % _ALIGNED == 0 for size in matrix.shape)
        if not (aligned and out.is_cuda and out.is_contiguous()):
            return False
        whole = len(out) % _ALIGNED == 0 and matrix.shape[1] % (_BLOCKS[1] * _SCALES) == 0
        return matrix.group == 0 or (whole and (matrix.rows, matrix.group) == _BLOCKS)

    def _of_library(self, x: RoundedRows, matrix: PackedMatrix, out: torch.Tensor) -> torch.Tensor:
        numbers, scales = matrix.numbers.view(FP8).T, matrix.scales.T
        if matrix.group == 0:
            bias, of_x = self.bias, x.scales.view(-1, 1)
            return torch._scaled_mm(
                x.numbers, numbers, of_x, scales, bias, out_dtype=out.dtype, out=out
            )
        torch._scaled_mm(x.numbers, numbers, x.scales.T, scales, out_dtype=out.dtype, out=out)
        return out if self.bias is None else out.add_(self.bias)

    def operands(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make random operands of the product, x and out, for timing."""
        return self.base.operands(rows)

    def dequantised(self) -> torch.Tensor:
        """Write the matrix out as plain numbers, a new tensor at each call."""
        return self.base.dequantised()


def of_rounded_inputs(
    base: DenseLinear | QuantisedLinear, form: InputForm | None, scale: float | None = None
) -> DenseLinear | QuantisedLinear | RoundedLinear:
    """Return the product with rounded inputs. form: None = as they are. scale: of all inputs, where
    the form has one.
    """
    if form is None:
        return base
    group = form.group if form.group < base.in_features else 0
    most = inf if form.most is None else form.most
    return RoundedLinear(base, RowForm(group, most, scale, FP8 if form.numbers == "fp8" else INT8))


def row_form(linears: Iterable[DenseLinear | QuantisedLinear | RoundedLinear]) -> RowForm | None:
    """The form of rows that the writers of inputs can leave beside them; None = of no use.

    Inputs of another form, and those whose scale the checkpoint has, take a kernel of their own.
    """
    forms = {
        linear.form
        for linear in linears
        if isinstance(linear, RoundedLinear)
        and linear.multiplies_rounded
        and linear.form.scale is None
    }
    form = forms.pop() if len(forms) == 1 else None
    return form if form is not None and form.group <= _MOST_GROUP else None
