"""Rows in FP8 (E4M3) or int8, as the kernels of products take them. Needs no Triton."""

from typing import NamedTuple

import torch

FP8, INT8 = torch.float8_e4m3fn, torch.int8
FP8_MOST = torch.finfo(FP8).max
# What the largest magnitude becomes, before it is rounded: half of what int8's range spans.
INT8_MOST = 127.5


class RowForm(NamedTuple):
    """How rows become numbers of eight bits: `number * scale`.

    group: inputs of a row that share a scale, 0 = all of them. most: the largest magnitude that a
    scale covers; what lies beyond becomes the largest number. scale: the one scale of all rows;
    None = the largest magnitude of those that share it over `largest`. dtype: FP8 or INT8, which is
    rounded to even.
    """

    group: int = 0
    most: float = float("inf")
    scale: float | None = None
    dtype: torch.dtype = FP8

    @property
    def largest(self) -> float:
        """The number that the largest magnitude becomes, before rounding."""
        return FP8_MOST if self.dtype == FP8 else INT8_MOST

    @property
    def groups(self) -> int:
        """The kernels' constant: `group`, -1 = one scale of all rows."""
        return self.group if self.scale is None else -1

    @property
    def limit(self) -> float:
        """The kernels' argument: the one scale, or the most that a scale covers."""
        return self.most if self.scale is None else self.scale


class RoundedRows(NamedTuple):
    """Rows in eight bits. numbers: FP8 or INT8 `[rows, in_features]`, contiguous. scales: float32
    `[groups, rows]`, contiguous, of one group where a row has one scale.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return len(self.numbers)


# Room for rounded rows, and their form.
Rounding = tuple[RoundedRows, RowForm]


def allocate_rows(x: torch.Tensor, form: RowForm, features: int | None = None) -> RoundedRows:
    """Allocate rounded rows, of undefined content. features: of a row, None = those of x."""
    features = x.shape[1] if features is None else features
    groups = -(-features // form.group) if form.group else 1
    numbers = x.new_empty(len(x), features, dtype=form.dtype)
    return RoundedRows(numbers, x.new_empty(groups, len(x), dtype=torch.float32))


def quantise_reference(x: torch.Tensor, form: RowForm) -> RoundedRows:
    """Quantise rows by plain torch. x: `[rows, in_features]`, of any float dtype."""
    wide, rows = x.float(), len(x)
    group = form.group or x.shape[1]
    parts = torch.nn.functional.pad(wide, (0, -x.shape[1] % group)).view(rows, -1, group)
    if form.scale is not None:
        scales = torch.full((rows, 1, 1), form.scale, device=x.device)
    else:
        largest = parts.abs().amax(2, keepdim=True).clamp(max=form.most)
        scales = torch.where(largest > 0, largest / form.largest, 1.0)
    numbers = (parts / scales).flatten(1)[:, : x.shape[1]]
    if form.dtype == FP8:
        numbers = numbers.clamp(-FP8_MOST, FP8_MOST)
    else:
        numbers = numbers.round().clamp(-128, 127)
    return RoundedRows(numbers.to(form.dtype), scales.squeeze(2).T.contiguous())


def rounded(x: torch.Tensor, form: RowForm) -> torch.Tensor:
    """Round rows to what their eight bits stand for, in x's dtype."""
    numbers, scales = quantise_reference(x, form)
    spread = scales.T.repeat_interleave(form.group or x.shape[1], dim=1)[:, : x.shape[1]]
    return (numbers.float() * spread).to(x.dtype)
