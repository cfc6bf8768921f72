"""A quantised matrix as the kernels of products take it. Needs no Triton."""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from loraplex.server.kernels.linear.row_form import FP8, INT8


class Form(NamedTuple):
    """Constants of the kernels that read a matrix.

    bits: of a code; 0 = FP8, -1 = floating point.
    group: inputs that share a scale; 0 = all. rows: outputs that do. run: as of
    PackedMatrix. zero: of all codes, -1 = each group has its own. table, order: whether there is
    one. native: on a GPU, which for FP8 is one that converts it. split: as of PackedMatrix.
    """

    bits: int
    group: int
    rows: int
    run: int
    zero: int
    table: bool
    order: bool
    native: bool
    split: str = ""


# Of a matrix in floating point.
DENSE = Form(-1, 0, 1, 0, 0, False, False, False)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Quantised matrix as the kernels read it: `[out, in]`, either FP8 numbers times scales, or
    codes: `table[code] * scale` or `(code - zero) * scale`.

    numbers: uint8 `[out, bytes of a row]`, contiguous; int8 where the zero of 8 bits is 0. Codes of
    4 bits lie in runs of `run` inputs: the first half of a run in the lower bits of its bytes, the
    second in the upper ones. scales: `[ceil(out / rows), groups]`. in_features: of whole runs.
    bits: of a code; 0 = FP8. group: inputs that share a scale, a power of two; 0 = all. rows:
    outputs that do. zeros: uint8, as scales, or one for all. table: float32 `[16]`; split: the
    assembly of `split.py`, of 4-bit codes. matrices: so many lie one below the other. order: int32
    `[in]`, the input that each column stands for. arrivals: int32 zeros, one for each 16 outputs,
    by which programs that share inputs find the last of them.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    arrivals: torch.Tensor
    in_features: int
    bits: int
    group: int
    rows: int = 1
    zeros: torch.Tensor | int = 0
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    run: int = 0
    split: str = ""
    matrices: int = 1

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.numbers), self.in_features))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scales, zeros, table and order, with the numbers in place of what is not there."""
        numbers, zeros = self.numbers, self.zeros
        return (
            self.scales,
            zeros if isinstance(zeros, torch.Tensor) else numbers,
            numbers if self.table is None else self.table,
            numbers if self.order is None else self.order,
        )

    @property
    def rounded_dtype(self) -> torch.dtype | None:
        """The dtype of inputs that the numbers are multiplied with as they are; None = of none."""
        if self.bits == 0:
            return FP8
        return INT8 if self.numbers.dtype == INT8 else None

    @property
    def nbytes(self) -> int:
        tensors = (self.numbers, self.scales, self.zeros, self.table, self.order)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def matrix(self, number: int) -> "PackedMatrix":
        """Return one of the matrices. Its rows must be whole blocks of scales."""
        outputs, blocks = (len(each) // self.matrices for each in (self.numbers, self.scales))
        of_blocks = slice(number * blocks, (number + 1) * blocks)
        zeros = self.zeros
        return replace(
            self,
            numbers=self.numbers[number * outputs : (number + 1) * outputs],
            scales=self.scales[of_blocks],
            zeros=zeros[of_blocks] if isinstance(zeros, torch.Tensor) else zeros,
            matrices=1,
        )

    def form(self) -> Form:
        return Form(
            bits=self.bits,
            group=self.group,
            rows=self.rows,
            run=self.run,
            zero=-1 if isinstance(self.zeros, torch.Tensor) else self.zeros,
            table=self.table is not None,
            order=self.order is not None,
            native=_converts(self.bits, self.numbers.device),
            split=self.split,
        )


Weight = torch.Tensor | PackedMatrix


def form_of(weight: Weight) -> Form:
    """The kernel's constants of a weight."""
    return weight.form() if isinstance(weight, PackedMatrix) else DENSE


@cache
def _converts(bits: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return bits > 0 or torch.cuda.get_device_capability(device) >= (8, 9)
