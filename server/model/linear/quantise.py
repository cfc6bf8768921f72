"""Matrices in floating point made into quantised ones, on their device."""

import torch

from loraplex.server.kernels.linear.row_form import RowForm, quantise_reference
from loraplex.server.model.linear.packed import PackedWeight, packed
from loraplex.server.model.quantisation.forms import FOUR_BIT_BLOCK, EightBitForm, WeightForm

# QLoRA (Dettmers et al. 2023), appendix E: quantiles of the normal distribution, with an exact 0.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Rows that are quantised at once.
_ROWS = 2048


def quantise(weight: torch.Tensor, form: WeightForm) -> PackedWeight | None:
    """Quantise a plain matrix. weight: `[out, in]`, finite. form: FP8 with a scale for each
    output, or NF4. None where the form does not take its shape.
    """
    if isinstance(form, EightBitForm):
        return _to_fp8(weight)
    return _to_nf4(weight) if weight.shape[1] % FOUR_BIT_BLOCK == 0 else None


def _to_fp8(weight: torch.Tensor) -> PackedWeight:
    """A scale for each output, by which the largest number becomes the largest of E4M3."""
    starts = range(0, len(weight), _ROWS)
    parts = [quantise_reference(weight[first : first + _ROWS], RowForm()) for first in starts]
    numbers = torch.cat([part.numbers for part in parts])
    scales = torch.cat([part.scales for part in parts], dim=1).T.contiguous()
    return PackedWeight(numbers, weight.shape[1], 0, weight.shape[1], scales)


def _to_nf4(weight: torch.Tensor) -> PackedWeight:
    """The nearest code of each number over the largest of its block; of two as near the lower."""
    outputs, inputs = weight.shape
    table = torch.tensor(NF4, device=weight.device)
    limits = (table[1:] + table[:-1]) / 2
    codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, inputs // FOUR_BIT_BLOCK, device=weight.device)
    for first in range(0, outputs, _ROWS):
        rows = slice(first, first + _ROWS)
        blocks = weight[rows].float().view(-1, inputs // FOUR_BIT_BLOCK, FOUR_BIT_BLOCK)
        scales[rows] = blocks.abs().amax(2)
        most = torch.where(scales[rows] > 0, scales[rows], 1.0)
        found = torch.bucketize(blocks / most.unsqueeze(2), limits)
        codes[rows] = packed(found.to(torch.uint8).flatten(1), 4)
    return PackedWeight(codes, inputs, 4, FOUR_BIT_BLOCK, scales, table=table)
