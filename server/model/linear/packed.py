"""Quantised matrices in memory: two layouts, into which checkpoints' forms are unpacked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

# Numbers that are dequantised at once: float32 of all of a large matrix would take gigabytes.
_CHUNK = 1 << 24


class _Layout(Protocol):
    @property
    def shape(self) -> torch.Size: ...

    def values(self, rows: slice) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """FP8 weight with scales: `number * scale`. numbers: float8_e4m3fn `[out, in]`. scales: float32
    `[ceil(out / rows), ceil(in / columns)]`, one for each block of so many rows and columns.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, `[out_features, in_features]`."""
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def cut(self, rows: slice, columns: slice) -> "Fp8Weight | None":
        """Cut some rows and columns out; None where columns begin within a block."""
        high, wide = self.block
        outputs, inputs = self.shape
        of_rows, of_columns = _groups(rows, high, outputs), _groups(columns, wide, inputs)
        if of_columns is None:
            return None
        if of_rows is None:
            return self.by_row().cut(rows, columns)
        scales = self.scales[of_rows, of_columns]
        return replace(self, numbers=self.numbers[rows, columns], scales=scales)

    def to(self, device: torch.device) -> "Fp8Weight":
        return replace(self, numbers=self.numbers.to(device), scales=self.scales.to(device))

    def by_row(self) -> "Fp8Weight":
        """Return the weight with scales of blocks of one row."""
        rows, columns = self.block
        scales = self.scales.repeat_interleave(rows, dim=0)[: len(self.numbers)]
        return replace(self, scales=scales, block=(1, columns))

    def values(self, rows: slice) -> torch.Tensor:
        """Dequantise some rows, float32 `[rows, in]`."""
        high, wide = self.block
        blocks = torch.arange(rows.start, rows.stop, device=self.scales.device) // high
        return self.numbers[rows].float() * _spread(self.scales[blocks], wide, self.shape[1])

    def dequantised(self, out: torch.Tensor) -> torch.Tensor:
        return _dequantised(self, out)


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
        """Shape of the matrix, `[out_features, in_features]`."""
        return torch.Size((len(self.codes), self.in_features))

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.table, self.order)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

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

    def cut(self, rows: slice, columns: slice) -> "GroupedWeight | None":
        """Cut some rows and columns out; None where columns begin within a group, or are sorted."""
        width = columns.stop - columns.start
        if width == self.in_features:
            groups, codes = slice(None), self.codes
        else:
            found = _groups(columns, self.group, self.in_features)
            if self.order is not None or found is None or columns.start * self.bits % 8:
                return None
            groups = found
            ends = columns.start * self.bits // 8, -(-columns.stop * self.bits // 8)
            codes = self.codes[:, slice(*ends)]
        zeros = self.zeros
        return replace(
            self,
            codes=codes[rows],
            in_features=width,
            scales=self.scales[rows, groups],
            zeros=zeros[rows, groups] if isinstance(zeros, torch.Tensor) else zeros,
        )

    def values(self, rows: slice) -> torch.Tensor:
        """Dequantise some rows, float32 `[rows, in]`."""
        width = self.in_features
        codes = unpacked(self.codes[rows], self.bits)[:, :width]
        if self.table is not None:
            values = self.table[codes.int()]
        elif isinstance(self.zeros, torch.Tensor):
            values = codes.float() - _spread(self.zeros[rows].float(), self.group, width)
        else:
            values = codes.float() - self.zeros
        values *= _spread(self.scales[rows].float(), self.group, width)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def dequantised(self, out: torch.Tensor) -> torch.Tensor:
        return _dequantised(self, out)


PackedWeight = Fp8Weight | GroupedWeight


def _groups(features: slice, group: int, total: int) -> slice | None:
    """Groups of some features; None where the features begin within a group."""
    if group >= total:
        return slice(0, 1)
    if features.start % group:
        return None
    return slice(features.start // group, -(-features.stop // group))


def joined(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """The matrix of all parts, one below the other; None where their layouts differ."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Fp8Weight) for part in parts):
        return _joined_fp8(cast(Sequence[Fp8Weight], parts))
    if all(isinstance(part, GroupedWeight) for part in parts):
        return _joined_groups(cast(Sequence[GroupedWeight], parts))
    return None


def _joined_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    rows = parts[0].block[0]
    if any(part.block[0] != rows or part.shape[0] % rows for part in parts):
        parts = [part.by_row() for part in parts]
    if len({part.block for part in parts}) != 1:
        return None
    return Fp8Weight(_cat(parts, "numbers"), _cat(parts, "scales"), parts[0].block)


def _joined_groups(parts: Sequence[GroupedWeight]) -> GroupedWeight | None:
    first = parts[0]
    same = all(
        (part.in_features, part.bits, part.group) == (first.in_features, first.bits, first.group)
        and part.scales.dtype == first.scales.dtype
        and _equal(part.table, first.table)
        and _equal(part.order, first.order)
        for part in parts
    )
    if not same:
        return None
    zeros: torch.Tensor | int = first.zeros
    if any(isinstance(part.zeros, torch.Tensor) or part.zeros != zeros for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts])
    return replace(first, codes=_cat(parts, "codes"), scales=_cat(parts, "scales"), zeros=zeros)


def _cat(parts: Sequence[PackedWeight], name: str) -> torch.Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def _zeros(part: GroupedWeight) -> torch.Tensor:
    if isinstance(part.zeros, torch.Tensor):
        return part.zeros
    return torch.full_like(part.scales, part.zeros, dtype=torch.uint8)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes: uint8 `[rows, n]` -> `[rows, n * 8 / bits]`."""
    if bits == 8:
        return codes
    return torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes: uint8 `[rows, n]` -> `[rows, ceil(n * bits / 8)]`."""
    codes = codes.contiguous()
    if bits == 8:
        return codes
    first = codes[:, ::2].clone(memory_format=torch.contiguous_format)
    first[:, : codes.shape[1] // 2] |= codes[:, 1::2] << 4
    return first


def _spread(of_groups: torch.Tensor, group: int, width: int) -> torch.Tensor:
    """Repeat each group's number for its inputs: `[rows, groups]` -> `[rows, width]`."""
    return of_groups.repeat_interleave(group, dim=1)[:, :width]


def _dequantised(weight: _Layout, out: torch.Tensor) -> torch.Tensor:
    """Dequantise codes to `out`, `[out, in]`, rounded to its dtype once. Returns it."""
    for rows in _chunks(weight.shape):
        out[rows].copy_(weight.values(rows))
    return out


def _chunks(shape: torch.Size) -> Iterator[slice]:
    rows, width = shape
    step = max(1, _CHUNK // max(width, 1))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
