"""Quantised matrices in memory: few layouts, into which checkpoints' forms are unpacked."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

# Numbers that are dequantised at once: float32 of all of a large matrix would take gigabytes.
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """`(number - zero) * scale`, of FP8 or int8 numbers.

    numbers: float8_e4m3fn or int8 `[out, in]`. scales: float32 `[ceil(out / rows), ceil(in /
    columns)]`, one for each block of so many rows and columns. zeros: int8, as scales, or None.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    zeros: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[out_features, in_features]`."""
        return self.numbers.shape

    def to(self, device: torch.device) -> "ScaledWeight":
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, numbers=self.numbers.to(device), scales=self.scales.to(device), zeros=zeros
        )

    def dequantised(self, out: torch.Tensor) -> torch.Tensor:
        """Written to `out`, `[out, in]`, rounded to its dtype once. Returns it."""
        rows, columns = self.block
        for chunk in _chunks(self.shape):
            values = self.numbers[chunk].float()
            of_rows = torch.arange(chunk.start, chunk.stop, device=out.device) // rows
            if self.zeros is not None:
                values -= _spread(self.zeros[of_rows].float(), columns, values.shape[1])
            values *= _spread(self.scales[of_rows], columns, values.shape[1])
            out[chunk].copy_(values)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """Codes of 4 or 8 bits, of which `group` neighbours in a row share a scale: `table[code] *
    scale`, or `(code - zero) * scale`.

    codes: uint8 `[out, ceil(in_features * bits / 8)]`, of two in a byte the first in the lower
    bits. scales: `[out, groups]`, in the dtype of the checkpoint. zeros: uint8 `[out, groups]`, or
    one for all. table: float32 `[16]`, in place of zeros. order: int64 `[in]`, the input that each
    column of codes stands for; None = its own.
    """

    codes: torch.Tensor
    in_features: int
    bits: int
    group: int
    scales: torch.Tensor
    zeros: torch.Tensor | int = 0
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[out_features, in_features]`."""
        return torch.Size((len(self.codes), self.in_features))

    def to(self, device: torch.device) -> "GroupedWeight":
        zeros = self.zeros
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=zeros.to(device) if isinstance(zeros, torch.Tensor) else zeros,
            table=None if self.table is None else self.table.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def dequantised(self, out: torch.Tensor) -> torch.Tensor:
        """As of ScaledWeight."""
        width = self.in_features
        for chunk in _chunks(self.shape):
            codes = unpacked(self.codes[chunk], self.bits)[:, :width]
            if self.table is not None:
                values = self.table[codes.int()]
            else:
                zeros = self.zeros
                if isinstance(zeros, torch.Tensor):
                    zeros = _spread(zeros[chunk].float(), self.group, width)
                values = codes.float() - zeros
            values *= _spread(self.scales[chunk].float(), self.group, width)
            if self.order is None:
                out[chunk].copy_(values)
            else:
                out[chunk, self.order] = values.to(out.dtype)
        return out


PackedWeight = ScaledWeight | GroupedWeight


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[rows, n]` -> `[rows, n * 8 / bits]`."""
    if bits == 8:
        return codes
    return torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[rows, n]` -> `[rows, ceil(n * bits / 8)]`."""
    if bits == 8:
        return codes.contiguous()
    first = codes[:, ::2].clone()
    first[:, : codes.shape[1] // 2] |= codes[:, 1::2] << 4
    return first


def _spread(of_groups: torch.Tensor, group: int, width: int) -> torch.Tensor:
    """`[rows, groups]` -> `[rows, width]`."""
    return of_groups.repeat_interleave(group, dim=1)[:, :width]


def _chunks(shape: torch.Size) -> Iterator[slice]:
    rows, width = shape
    step = max(1, _CHUNK // max(width, 1))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
