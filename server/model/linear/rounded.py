"""A matrix of the base whose inputs have eight bits, and the ways to multiply with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs, PackedConfig
from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.kernels.linear.row_form import FP8, INT8, RoundedRows, RowForm, rounded
from loraplex.server.model.linear.dense import DEFAULT, DenseLinear, Way
from loraplex.server.model.linear.quantised import QuantisedLinear
from loraplex.server.model.quantisation.forms import InputForm

# Columns of which an activation's program has some power of two: groups must be whole there.
_MOST_GROUP = 1024
# What the library takes: multiples of so many features, and in blocks of so many rows and columns
# of so many tokens. It reads scales of blocks in rows of multiples of four, whatever it is given.
_ALIGNED, _BLOCKS, _SCALES = 16, (128, 128), 4
# For products of any number of rows that the library has not: FP8 of odd shapes, and int8.
_OF_ODD_SHAPES = PackedConfig(64, 128, 4, 4, programmatic_launch=False)
_OF_INT8 = PackedConfig(128, 128, 8, 3, programmatic_launch=False)


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
        from loraplex.server.kernels.linear.rounded_product import rounded_product

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
