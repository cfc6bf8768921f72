"""Rows in FP8 (E4M3), as the kernels of products take them. Needs no Triton."""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
FP8_MOST = torch.finfo(FP8).max


class RowForm(NamedTuple):
    """How rows become FP8: `number * scale`.

    group: inputs of a row that share a scale, 0 = all of them. most: the largest magnitude that a
    scale covers; what lies beyond becomes the largest number. scale: the one scale of all rows;
    None = the largest magnitude of those that share it over FP8's largest number.
    """

    group: int = 0
    most: float = float("inf")
    scale: float | None = None

    @property
    def groups(self) -> int:
        """The kernels' constant: `group`, -1 = one scale of all rows."""
        return self.group if self.scale is None else -1

    @property
    def limit(self) -> float:
        """The kernels' argument: the one scale, or the most that a scale covers."""
        return self.most if self.scale is None else self.scale


class Fp8Rows(NamedTuple):
    """Rows in FP8. numbers: float8_e4m3fn `[rows, in_features]`, contiguous. scales: float32
    `[groups, rows]`, contiguous, of one group where a row has one scale.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return len(self.numbers)


def allocate_rows(x: torch.Tensor, form: RowForm, features: int | None = None) -> Fp8Rows:
    """Allocate room for FP8 rows. features: of a row, None = those of x; content is undefined."""
    features = x.shape[1] if features is None else features
    groups = -(-features // form.group) if form.group else 1
    numbers = x.new_empty(len(x), features, dtype=FP8)
    return Fp8Rows(numbers, x.new_empty(groups, len(x), dtype=torch.float32))


def quantise_reference(x: torch.Tensor, form: RowForm) -> Fp8Rows:
    """Quantise rows by plain torch. x: `[rows, in_features]`, of any float dtype."""
    wide, rows = x.float(), len(x)
    group = form.group or x.shape[1]
    parts = torch.nn.functional.pad(wide, (0, -x.shape[1] % group)).view(rows, -1, group)
    if form.scale is not None:
        scales = torch.full((rows, 1, 1), form.scale, device=x.device)
    else:
        largest = parts.abs().amax(2, keepdim=True).clamp(max=form.most)
        scales = torch.where(largest > 0, largest / FP8_MOST, 1.0)
    numbers = (parts / scales).clamp(-FP8_MOST, FP8_MOST).flatten(1)[:, : x.shape[1]]
    return Fp8Rows(numbers.to(FP8), scales.squeeze(2).T.contiguous())


def rounded(x: torch.Tensor, form: RowForm) -> torch.Tensor:
    """Round rows to what their FP8 stands for, in x's dtype."""
    numbers, scales = quantise_reference(x, form)
    spread = scales.T.repeat_interleave(form.group or x.shape[1], dim=1)[:, : x.shape[1]]
    return (numbers.float() * spread).to(x.dtype)
