"""MXFP4 is read exactly: as transformers reads it, and as OCP's table says."""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loraplex.server.model.checkpoint.area import whole
from loraplex.server.model.checkpoint.unpack import grouped

# OCP Microscaling Formats 1.0, FP4 E2M1, by code.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def blocks_of(codes: torch.Tensor) -> torch.Tensor:
    """codes: uint8 `[rows, n, 32]`; the first of two lies in the lower bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks: uint8 `[rows, n, 16]`; scales: uint8 `[rows, n]` -> float32 `[rows, 32 n]`."""
    shape = len(scales), 32 * scales.shape[1]
    return grouped(blocks, scales, whole(shape)).weight.dequantised(torch.empty(shape))


def test_every_code_and_scale_is_its_value() -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    scales = torch.arange(255, dtype=torch.uint8)
    found = dequantise(blocks_of(codes.expand(1, 255, 32)), scales[None])
    powers = torch.tensor([2.0**power for power in range(-127, 128)], dtype=torch.float64)
    exact = torch.tensor(E2M1 * 2, dtype=torch.float64) * powers[:, None]
    assert torch.equal(found.view(255, 32), exact.float())


def test_as_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 6, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)  # [experts, in, out] in bfloat16
    for expert in range(3):
        found = dequantise(blocks[expert], scales[expert])
        assert torch.equal(found.bfloat16(), expected[expert].T)
        assert torch.equal(found, found.bfloat16().float())
