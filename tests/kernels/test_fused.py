"""Kernels that finish LoRA on their way, against the reference and plain torch."""

import pytest
import torch
from torch.nn import functional

from server.kernels.add_norm import add_norm
from server.kernels.configs import Phase, load_configs
from server.kernels.pending import PendingDelta, PendingLora
from server.kernels.reference import lora_reference
from server.kernels.segments import route
from server.kernels.shrink import shrink
from server.kernels.silu import silu_mul
from server.kernels.silu_lora import silu_mul_lora
from tests.kernels.batches import SITE, Adapters, assert_close, make_batch

EPSILON = 1e-5


@pytest.mark.parametrize("features", [96, 200])
def test_norm_of_a_sum_with_a_delta(device: torch.device, features: int) -> None:
    """Where no adapter wrote, the delta's NaN is not read."""
    torch.manual_seed(9)
    adapters = Adapters(torch.float32, device, 3)
    adapters.put(0, 64, (features,), (16,))
    adapters.put(1, 64, (features,), (0,))
    slots = [0, -1, 1, 2, 0, 0]
    batch = make_batch(6, adapters)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y, hidden = (torch.randn(6, n, device=device) for n in (64, features, features))
    weight = torch.randn(features, device=device)
    delta = torch.full_like(y, float("nan"))
    batch.run(delta, x, (features,), adapters.table, accumulate=False)
    total = lora_reference(y, x, slots, adapters.weights, (features,)).to(device) + hidden
    normed = functional.rms_norm(total, (features,), weight, EPSILON)
    pending = PendingDelta(adapters.table, SITE, batch.slots, delta)
    add_norm(y, pending, hidden, weight, EPSILON, programmatic_launch=False)
    assert_close(hidden, total, torch.float32)
    assert_close(y, normed, torch.float32)
    add_norm(y, None, hidden, weight, EPSILON, programmatic_launch=False)
    assert_close(hidden, total + normed, torch.float32)


def test_activation_without_adapters(device: torch.device) -> None:
    y = torch.randn(5, 2 * 1100, device=device)
    gate, up = y.chunk(2, dim=-1)
    out = silu_mul(y, programmatic_launch=False)
    assert_close(out, functional.silu(gate) * up, torch.float32)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("inner", [48, 200])
def test_activation_of_a_product(device: torch.device, phase: Phase, inner: int) -> None:
    """Single rows, tiles, rows without an adapter, and a projection that is left alone."""
    torch.manual_seed(inner)
    adapters = Adapters(torch.float32, device, 5)
    for slot, ranks in enumerate([(16, 16), (3, 0), (0, 40), (100, 8)]):
        adapters.put(slot, 96, (inner, inner), ranks)
    slots = [0] * 20 + [-1] * 18 + [1, 2, 4, -1, 3, 3, 3, 1] + [3] * 70
    batch = make_batch(len(slots), adapters, phase)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y = (torch.randn(len(slots), n, device=device) for n in (96, 2 * inner))
    configs = load_configs(device)
    route(batch.slots, batch.segments)
    config = configs.shrink(phase, len(slots), 256, 96)
    shrink(x, adapters.table, SITE, batch.segments, batch.workspace, config)
    fused = configs.fused(phase, len(slots))
    pending = PendingLora(adapters.table, SITE, batch.segments, batch.workspace)
    out = silu_mul_lora(y, pending, fused)
    gate, up = lora_reference(y, x, slots, adapters.weights, (inner, inner)).chunk(2, dim=-1)
    assert_close(out, functional.silu(gate) * up, torch.float32)
