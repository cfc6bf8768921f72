"""Quantised matrices in memory, in the layout into which checkpoints' forms are unpacked."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

# Numbers that are dequantised at once: float32 of all of a large matrix would take gigabytes.
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Quantised matrix `[out, in]`, in which `group` neighbours in a row, and `rows` rows, share a
    scale: FP8 numbers times scales, or codes: `table[code] * scale`, or `(code - zero) * scale`.

    codes: uint8 `[out, ceil(in_features * bits / 8)]`, of two in a byte the first in the lower
    bits; of FP8 float8_e4m3fn `[out, in]`. bits: of a code, 4 or 8; 0 = FP8. scales: `[ceil(out /
    rows), groups]`, in the dtype of the checkpoint; float32 of FP8. zeros: uint8 `[out, groups]`,
    or one for all. table: float32 `[16]`, in place of zeros. order: int64 `[in]`, the input that
    each column of codes stands for; None = its own. rows: 1 of all but FP8.
    """

    codes: torch.Tensor
    in_features: int
    bits: int
    group: int
    scales: torch.Tensor
    zeros: torch.Tensor | int = 0
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    rows: int = 1

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, `[out_features, in_features]`."""
        return torch.Size((len(self.codes), self.in_features))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, Any]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device) -> "PackedWeight":
        return replace(self, **{name: of.to(device) for name, of in self._tensors().items()})

    def by_row(self) -> "PackedWeight":
        """Return the weight with scales of each row."""
        scales = self.scales.repeat_interleave(self.rows, dim=0)[: len(self.codes)]
        return replace(self, scales=scales, rows=1)

    def cut(self, rows: slice, columns: slice) -> "PackedWeight | None":
        """Cut some rows and columns out; None where columns begin within a group, or are sorted."""
        width, bits = columns.stop - columns.start, self.bits or 8
        groups = _groups(columns, self.group, self.in_features)
        is_part = width < self.in_features
        if groups is None or (is_part and (self.order is not None or columns.start * bits % 8)):
            return None
        of_rows = _groups(rows, self.rows, len(self.codes))
        if of_rows is None:
            return self.by_row().cut(rows, columns)
        zeros = self.zeros
        return replace(
            self,
            codes=self.codes[rows, columns.start * bits // 8 : -(-columns.stop * bits // 8)],
            in_features=width,
            scales=self.scales[of_rows, groups],
            zeros=zeros[rows, groups] if isinstance(zeros, torch.Tensor) else zeros,
        )

    def values(self, rows: slice) -> torch.Tensor:
        """Dequantise some rows, float32 `[rows, in]`."""
        width = self.in_features
        of_rows: slice | torch.Tensor = rows
        if self.rows > 1:
            every = torch.arange(rows.start, rows.stop, device=self.scales.device)
            of_rows = every // self.rows
        codes = unpacked(self.codes[rows], self.bits)[:, :width]
        if self.table is not None:
            values = self.table[codes.int()]
        elif isinstance(self.zeros, torch.Tensor):
            values = codes.float() - _spread(self.zeros[rows].float(), self.group, width)
        else:
            values = codes.float() - self.zeros if self.zeros else codes.float()
        values *= _spread(self.scales[of_rows].float(), self.group, width)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def dequantised(self, out: torch.Tensor) -> torch.Tensor:
        """Dequantise codes to `out`, `[out, in]`, rounded to its dtype once. Returns it."""
        step = max(1, _CHUNK // max(self.in_features, 1))
        for first in range(0, len(out), step):
            rows = slice(first, min(first + step, len(out)))
            out[rows].copy_(self.values(rows))
        return out


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
    if any(part.rows != parts[0].rows or part.shape[0] % part.rows for part in parts):
        parts = [part.by_row() for part in parts]
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
    codes, scales = (torch.cat([getattr(part, of) for part in parts]) for of in ("codes", "scales"))
    zeros: torch.Tensor | int = first.zeros
    if any(isinstance(part.zeros, torch.Tensor) or part.zeros != zeros for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts])
    return replace(first, codes=codes, scales=scales, zeros=zeros)


def _zeros(part: PackedWeight) -> torch.Tensor:
    if isinstance(part.zeros, torch.Tensor):
        return part.zeros
    return torch.full_like(part.scales, part.zeros, dtype=torch.uint8)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes: uint8 `[rows, n]` -> `[rows, 2 * n]` of 4 bits, else themselves."""
    if bits != 4:
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
