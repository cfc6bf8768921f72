"""Quantised matrices of random numbers, made on their device, in the layout of a form."""

import math
from dataclasses import replace

import torch

from loraplex.server.model.checkpoint.area import whole
from loraplex.server.model.checkpoint.mxfp4 import SCALE_BIAS
from loraplex.server.model.checkpoint.mxfp4 import grouped as grouped_mxfp4
from loraplex.server.model.linear.packed import Fp8Weight, GroupedWeight, PackedWeight
from loraplex.server.model.linear.quantise import NF4
from loraplex.server.model.quantisation.forms import (
    FOUR_BIT_BLOCK,
    AwqForm,
    EightBitForm,
    FourBitForm,
    GptqForm,
    PackedForm,
    RowwiseForm,
    WeightForm,
)
from loraplex.server.model.spec.moe_spec import MXFP4_BLOCK

_STD_OF_CODES = 2.9  # of E2M1, each code as likely as another
_ROWS = 2048  # that are drawn at once


def random_packed(
    form: WeightForm, shape: tuple[int, int], std: float, device: torch.device
) -> PackedWeight:
    """shape: `[out, in]`. std: of its values, about."""
    match form:
        case EightBitForm(numbers="fp8"):
            return _fp8(form, shape, std, device)
        case EightBitForm() | RowwiseForm():
            return _codes(8, None, shape, std, device)
        case FourBitForm():
            weight = _codes(4, FOUR_BIT_BLOCK, shape, std, device)
            table = torch.tensor(NF4, device=device)
            scales = torch.full_like(weight.scales, 2 * std, dtype=torch.float32)
            return replace(weight, scales=scales, zeros=0, table=table)
        case AwqForm(group):
            return _codes(4, group, shape, std, device, zeros=True)
        case GptqForm(bits, group):
            return _codes(bits, group, shape, std, device, zeros=True)
        case PackedForm(bits, _, group, asymmetric):
            return _codes(bits, group, shape, std, device, zeros=asymmetric)


def random_mxfp4(shape: tuple[int, int], std: float, device: torch.device) -> PackedWeight:
    """As `random_packed`, of MXFP4."""
    blocks = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=device).random_()
    scales = torch.empty(shape[0], shape[1] // MXFP4_BLOCK, dtype=torch.uint8, device=device)
    return grouped_mxfp4(blocks, scales.fill_(_exponent(std)), whole(shape)).weight


def _exponent(std: float) -> int:
    """By whose power of two random codes get about this deviation."""
    return SCALE_BIAS + round(math.log2(std / _STD_OF_CODES))


def _fp8(form: EightBitForm, shape: tuple[int, int], std: float, device: torch.device) -> Fp8Weight:
    rows, columns = {"tensor": shape, "channel": (1, shape[1])}.get(form.scales, form.block)
    numbers = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for first in range(0, shape[0], _ROWS):
        part = numbers[first : first + _ROWS]
        part.copy_(torch.randn(part.shape, device=device))
    blocks = (-(-shape[0] // rows), -(-shape[1] // columns))
    return Fp8Weight(numbers, torch.full(blocks, std, device=device), (rows, columns))


def _codes(
    bits: int,
    group: int | None,
    shape: tuple[int, int],
    std: float,
    device: torch.device,
    *,
    zeros: bool = False,
) -> GroupedWeight:
    """Each code is as likely as another."""
    outputs, inputs = shape
    size = group or inputs
    groups = (outputs, -(-inputs // size))
    middle = 1 << bits - 1
    codes = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8, device=device)
    scales = torch.full(groups, std * 12**0.5 / (2 * middle), dtype=torch.float16, device=device)
    least: torch.Tensor | int = middle
    if zeros:
        least = torch.full(groups, middle, dtype=torch.uint8, device=device)
    return GroupedWeight(codes.random_(), inputs, bits, size, scales, least)
