"""A quantised matrix as the kernels of products take it, and the assembly that takes its 4-bit
codes out of bytes. Needs no Triton.

Codes come two in each byte, as bfloat16. `$4` are four bytes. `$0` and `$1` become what their first
codes stand for, `$2` and `$3` what their second ones do; two bfloat16 lie in a register.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from loraplex.server.kernels.linear.row_form import FP8, INT8

# Between 128 and 256 the last bit of a bfloat16 is worth one: 0x4300 | code is 128 + code. Two
# codes that are 16 bits apart come at once.
_SPLIT = """{{
    .reg .b32 one, less, pair;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, {0};
    prmt.b32 pair, $4, 0, 0x4140;
    lop3.b32 $0, pair, 0x000f000f, 0x43004300, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 $2, pair, 0x000f000f, 0x43004300, 0xea;
    prmt.b32 pair, $4, 0, 0x4342;
    lop3.b32 $1, pair, 0x000f000f, 0x43004300, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 $3, pair, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, $0, one, less;
    fma.rn.bf16x2 $1, $1, one, less;
    fma.rn.bf16x2 $2, $2, one, less;
    fma.rn.bf16x2 $3, $3, one, less;
    }}"""

# Of the four codes in the lowest bits of `word` the lower and the upper bytes of their values. A
# permutation of bytes looks a code up among eight; which eight it is the code's last bit says.
_LOOK_UP = """
    and.b32 code, word, 0x7777;
    shr.u32 last, word, 3;
    lop3.b32 last, last, 0x1111, 0x8888, 0xea;
    prmt.b32 last, 0x8000, 0, last;
    prmt.b32 first, {0}, {1}, code;
    prmt.b32 second, {2}, {3}, code;
    lop3.b32 low, first, second, last, 0xd8;
    prmt.b32 first, {4}, {5}, code;
    prmt.b32 second, {6}, {7}, code;
    lop3.b32 high, first, second, last, 0xd8;
"""


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
    assembly of 4-bit codes, as above. matrices: so many lie one below the other. order: int32
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


def split_of_codes(zero: int) -> str:
    """PTX that splits `code - zero`."""
    less = torch.tensor([-128 - zero] * 2, dtype=torch.bfloat16).view(torch.int32).item()
    return _SPLIT.format(f"0x{int(less) & 0xFFFFFFFF:08x}")


def split_of_table(values: bytes) -> str:
    """The assembly that looks up codes. values: of the 16 as bfloat16, little-endian."""
    planes = values[::2] + values[1::2]
    words = [planes[at : at + 4][::-1].hex() for at in range(0, len(planes), 4)]
    look_up = _LOOK_UP.format(*(f"0x{word}" for word in words))
    return f"""{{
    .reg .b32 word, code, first, second, last, low, high;
    mov.b32 word, $4;{look_up}
    prmt.b32 $0, low, high, 0x6240;
    prmt.b32 $2, low, high, 0x7351;
    shr.u32 word, $4, 16;{look_up}
    prmt.b32 $1, low, high, 0x6240;
    prmt.b32 $3, low, high, 0x7351;
    }}"""
