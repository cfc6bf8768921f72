"""MXFP4, as OCP's Microscaling Formats 1.0 defines it: blocks of FP4 (E2M1) with a scale (E8M0)."""

import torch

from loraplex.server.model.checkpoint.area import Area, UnpackedArea, around, units
from loraplex.server.model.linear.packed import PackedWeight
from loraplex.server.model.spec.linear_spec import MXFP4_BLOCK

# By a code's four bits: sign, two of the exponent, one of the mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
SCALE_BIAS = 127


def grouped(blocks: torch.Tensor, scales: torch.Tensor, area: Area) -> UnpackedArea:
    """An area without unpacking. blocks: uint8 `[rows, n, 16]` or `[rows, 16 n]`, the lower four
    bits first. scales: uint8 `[rows, n]`, powers of two, which become bfloat16: it has all of them,
    and values have two significant bits. So all is exact."""
    rows, inputs = scales.shape[0], scales.shape[1] * MXFP4_BLOCK
    area = Area(area.rows, around(area.columns, MXFP4_BLOCK, inputs))
    mine = area.rows, units(area.columns, MXFP4_BLOCK)
    exponents = scales[mine].to(torch.int32) - SCALE_BIAS
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents).bfloat16()
    table = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    codes = blocks.reshape(rows, scales.shape[1], -1)[mine].flatten(1).contiguous()
    weight = PackedWeight(codes, area.shape[1], 4, MXFP4_BLOCK, powers, table=table)
    return UnpackedArea(weight, area)
