"""Kernels that finish LoRA on their way, against the reference and plain torch."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from loraplex.server.kernels.launch.configs import Phase, load_configs
from loraplex.server.kernels.lora.expand import expand
from loraplex.server.kernels.lora.pending import PendingDelta, PendingLora
from loraplex.server.kernels.lora.segments import route
from loraplex.server.kernels.lora.shrink import shrink
from loraplex.server.kernels.lora.workspace import allocate_workspace
from loraplex.server.kernels.pointwise.add_norm import add_norm, rms_norm
from loraplex.server.kernels.pointwise.gated import Activation, gated, gated_lora
from tests.grids import beyond, sparse
from tests.kernels.batches import SITE, Adapters, assert_close, launch_configs, make_batch
from tests.kernels.reference import lora_reference

EPSILON = 1e-5


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@pytest.mark.parametrize("features", [96, 200])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize(("factor", "norm"), [(1.0, True), (0.22, True), (1.0, False)])
def test_norm_of_a_sum_with_a_delta(
    device: torch.device, features: int, post: bool, factor: float, norm: bool
) -> None:
    """Where no adapter wrote, the delta's NaN is not read. Without a norm y stays."""
    torch.manual_seed(9)
    adapters = Adapters(torch.float32, device, 3)
    adapters.put(0, 64, (features,), (16,))
    adapters.put(1, 64, (features,), (0,))
    slots = [0, -1, 1, 2, 0, 0]
    batch = make_batch(6, adapters)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y, hidden = (torch.randn(6, n, device=device) for n in (64, features, features))
    weight, of_post = torch.randn(2, features, device=device)
    delta = torch.full_like(y, float("nan"))
    batch.run(delta, x, (features,), adapters.table, accumulate=False)

    kept = 2 * factor - 1

    def expected(branch: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if post:
            branch = functional.rms_norm(branch, (features,), of_post, 1e-3)
        total = kept * hidden + factor * branch
        return total, functional.rms_norm(total, (features,), weight, EPSILON)

    branch = lora_reference(y, x, slots, adapters.weights, (features,)).to(device)
    norms = ((weight, EPSILON) if norm else None, (of_post, 1e-3) if post else None)
    pending = PendingDelta(adapters.table, SITE, batch.slots, delta)
    for delta_of in (pending, None):
        before = y.clone()
        total, normed = expected(branch, hidden)
        add_norm(y, delta_of, hidden, *norms, (factor, kept), programmatic_launch=False)
        assert_close(hidden, total, torch.float32)
        assert_close(y, normed if norm else before, torch.float32)
        branch = y.clone()


def test_weights_of_another_precision(device: torch.device) -> None:
    """Of a norm that adds to what is stored: the sum is not rounded to the model's type."""
    hidden, y = torch.randn(2, 3, 40, device=device).half()
    weight = 1 + 1e-4 * torch.randn(40, device=device)
    wide, before = hidden.float(), hidden.clone()
    out = rms_norm(hidden, (weight, EPSILON), programmatic_launch=False)
    assert_close(out, functional.rms_norm(wide, (40,), weight, EPSILON), torch.float16)
    assert torch.equal(hidden, before)
    add_norm(y, None, hidden, None, (weight, EPSILON), programmatic_launch=False)
    wide += functional.rms_norm(y.float(), (40,), weight, EPSILON)
    assert_close(hidden, wide, torch.float16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_without_adapters(device: torch.device, activation: Activation) -> None:
    y = torch.randn(5, 2 * 1100, device=device)
    gate, up = y.chunk(2, dim=-1)
    out = gated(y, None, activation, programmatic_launch=False)
    assert_close(out, ACTIVATIONS[activation](gate) * up, torch.float32)
    beside = torch.randn(5, 3, 1100, device=device)[:, 1]
    apart = gated(gate.contiguous(), None, activation, up=beside, programmatic_launch=False)
    assert_close(apart, ACTIVATIONS[activation](gate) * beside, torch.float32)


@pytest.mark.parametrize(("inner", "activation"), sparse([48, 1100], list(ACTIVATIONS)))
def test_activation_with_a_delta(device: torch.device, inner: int, activation: Activation) -> None:
    """Each half alone may be left as it is; the delta's NaN there is not read."""
    torch.manual_seed(inner)
    adapters = Adapters(torch.float32, device, 5)
    for slot, ranks in enumerate([(16, 16), (3, 0), (0, 40), (0, 0)]):
        adapters.put(slot, 96, (inner, inner), ranks)
    slots = [0, -1, 1, 2, 3, 4, 0, 1]
    batch = make_batch(len(slots), adapters)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y = (torch.randn(len(slots), n, device=device) for n in (96, 2 * inner))
    delta = torch.full_like(y, float("nan"))
    batch.run(delta, x, (inner, inner), adapters.table, accumulate=False)
    pending = PendingDelta(adapters.table, SITE, batch.slots, delta)
    out = gated(y, pending, activation, programmatic_launch=False)
    gate, up = lora_reference(y, x, slots, adapters.weights, (inner, inner)).chunk(2, dim=-1)
    assert_close(out, ACTIVATIONS[activation](gate) * up, torch.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_extremes(device: torch.device, activation: Activation) -> None:
    """Where powers of 2 are beyond float32, too."""
    gate = torch.tensor([-1e30, -1e4, -200, -126, -88, -30, -1e-3, 0, 1e-30, 30, 200, 1e30])
    up = torch.full_like(gate, 3.0)
    with np.errstate(over="ignore"):  # infinity is meant
        y = torch.cat((gate, up))[None].to(device)
        out = gated(y, None, activation, programmatic_launch=False)
    assert_close(out[0], (ACTIVATIONS[activation](gate) * up).to(device), torch.float32)


@pytest.mark.parametrize(
    ("phase", "inner", "activation"),
    sparse(["decode", "mixed", "prefill"], [48, 200, 512, 640], list(ACTIVATIONS)),
)
def test_activation_of_a_product(
    device: torch.device, phase: Phase, inner: int, activation: Activation
) -> None:
    """Single rows, tiles, rows without an adapter, and a projection that is left alone; columns
    that end with no step, with one of any tile, and with one that few rows do not have."""
    torch.manual_seed(inner)
    adapters = Adapters(torch.float32, device, 5)
    for slot, ranks in enumerate([(16, 16), (3, 0), (0, 40), (100, 8)]):
        adapters.put(slot, 96, (inner, inner), ranks)
    slots = [0] * 20 + [-1] * 18 + [1, 2, 3, -1, 3, 3, 4, 1] + [3] * 70
    batch = make_batch(len(slots), adapters, phase, whole=True)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y = (torch.randn(len(slots), n, device=device) for n in (96, 2 * inner))
    configs = launch_configs(device, phase)
    route(batch.slots, batch.segments, adapters.table)
    config = configs.shrink(phase, len(slots))
    shrink(x, adapters.table, SITE, batch.segments, batch.workspace, config)
    fused = configs.fused(phase, len(slots))
    pending = PendingLora(adapters.table, SITE, batch.segments, batch.workspace)
    out = gated_lora(y, pending, fused, activation)
    gate, up = lora_reference(y, x, slots, adapters.weights, (inner, inner)).chunk(2, dim=-1)
    assert_close(out, ACTIVATIONS[activation](gate) * up, torch.float32)


STEPS: list[tuple[Phase, int]] = [("mixed", 40), ("mixed", 1), ("prefill", 40), ("prefill", 1)]


@pytest.mark.parametrize(
    ("step", "ranks"), sparse(STEPS, [(8, 8), (32, 16), (64, 64), (3, 8), (100, 8)])
)
def test_what_float16_cannot_hold_before_the_product(
    device: torch.device, step: tuple[Phase, int], ranks: tuple[int, int]
) -> None:
    """Large scales, and B as small: `scale * v` is beyond float16, `scale * v B^T` is not. step:
    phase and rows."""
    phase, rows = step
    torch.manual_seed(rows)
    inner, scale = 48, 3000.0
    adapters = Adapters(torch.float16, device, 1)
    adapters.put(0, 96, (inner, inner), ranks, scales=(scale, scale), b_size=0.1 / scale)
    batch = make_batch(rows, adapters, phase, whole=True)
    batch.slots.zero_()
    x, y = (torch.randn(rows, n, device=device).half() for n in (96, 2 * inner))
    x *= 20
    configs = launch_configs(device, phase)
    route(batch.slots, batch.segments, adapters.table)
    config = configs.shrink(phase, rows)
    shrink(x, adapters.table, SITE, batch.segments, batch.workspace, config)
    pending = PendingLora(adapters.table, SITE, batch.segments, batch.workspace)
    out = gated_lora(y, pending, configs.fused(phase, rows), "silu")
    total = lora_reference(y, x, [0] * rows, adapters.weights, (inner, inner)).to(device)
    gate, up = total.float().chunk(2, dim=-1)
    assert_close(out, functional.silu(gate) * up, torch.float16)


@pytest.mark.gpu
def test_activation_of_more_rows_than_a_grid_has_in_its_second_dimension() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    y = torch.randn(70_000, 2 * 8, device="cuda", dtype=torch.bfloat16)
    gate, up = y.float().chunk(2, dim=-1)
    out = gated(y, None, "silu", programmatic_launch=False)
    assert_close(out, functional.silu(gate) * up, torch.bfloat16)


@pytest.mark.parametrize(
    ("inner", "width"), beyond(2, [(200, 16), (600, 32), (200, 32), (1500, 32)])
)
def test_activation_that_shrinks_for_the_next_site(
    device: torch.device, inner: int, width: int
) -> None:
    """Tiles full and not, few rows, several planes, rows without an adapter, sites left alone."""
    torch.manual_seed(inner)
    adapters = Adapters(torch.float32, device, 6)
    ranks = [((16, 16), 8), ((8, 0), 16), ((width, 8), width), ((8, width), 0), ((0, 0), width)]
    for slot, (pair, _) in enumerate(ranks):
        adapters.put(slot, 96, (inner, inner), pair)
    slots = [0] * 150 + [1] * 5 + [-1] * 70 + [2] * 40 + [3] * 20 + [4, 4, 5] + [0] * 9
    batch = make_batch(len(slots), adapters, "prefill")
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y = (torch.randn(len(slots), n, device=device) for n in (96, 2 * inner))
    configs = load_configs(device)
    route(batch.slots, batch.segments, adapters.table)
    config = configs.shrink("prefill", len(slots))
    shrink(x, adapters.table, SITE, batch.segments, batch.workspace, config)
    gate, up = lora_reference(y, x, slots, adapters.weights, (inner, inner)).chunk(2, dim=-1)
    for slot, (_, rank) in enumerate(ranks):
        adapters.put(slot, inner, (64,), (rank,), SITE + 1)
    shrunk = allocate_workspace(len(slots), torch.float32, device, 3, width)
    shrunk.planes.fill_(float("nan"))
    pending = PendingLora(adapters.table, SITE, batch.segments, batch.workspace)
    fused = configs.fused_shrink(len(slots))
    out = gated_lora(y, pending, fused, "silu", shrunk)
    assert_close(out, functional.silu(gate) * up, torch.float32)
    z = torch.randn(len(slots), 64, device=device)
    expected = lora_reference(z, out, slots, adapters.weights, (64,))
    taking = configs.expand("prefill", len(slots))
    expand(z, (64,), adapters.table, SITE + 1, batch.segments, shrunk, taking)
    assert_close(z, expected, torch.float32)
    few = make_batch(len(slots), adapters, "decode", whole=True)
    pending = PendingLora(adapters.table, SITE, few.segments, few.workspace)
    with pytest.raises(ValueError, match="beside the product"):
        gated_lora(y, pending, fused, "silu", shrunk)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 40])
def test_decodes_in_a_graph_whose_kernels_start_early(rows: int) -> None:
    """Each starts while the one before it drains, the product beside LoRA: as one by one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(rows)
    device, features, inner = torch.device("cuda"), 4096, 2048
    dtype = torch.bfloat16
    adapters = Adapters(dtype, device, 16, arena_bytes=1 << 26)
    for slot in range(16):
        adapters.put(slot, features, (inner, inner), (16, 16 if slot % 3 else 0))
    batch = make_batch(rows, adapters)
    slots = [i % 17 - 1 for i in range(rows)]
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    route(batch.slots, batch.segments, adapters.table)
    x, hidden, product, delta = (
        torch.zeros(rows, n, dtype=dtype, device=device)
        for n in (features, features, 2 * inner, 2 * inner)
    )
    weight = torch.randn(2 * inner, features, dtype=dtype, device=device) / 64
    norm = torch.ones(features, dtype=dtype, device=device)
    configs, side = load_configs(device), torch.cuda.Stream()
    pending = PendingDelta(adapters.table, SITE, batch.slots, delta)
    context = (adapters.table, SITE, batch.segments, batch.workspace)
    config = configs.shrink("decode", rows)
    expansion = configs.expand("decode", rows)

    def step(early: bool) -> torch.Tensor:
        main = torch.cuda.current_stream()
        add_norm(x, None, hidden, (norm, EPSILON), programmatic_launch=early)
        side.wait_stream(main)
        shrink(x, *context, config, after_input=early)
        expand(delta, (inner, inner), *context, expansion, accumulate=False, after_gemm=early)
        with torch.cuda.stream(side):
            torch.mm(x, weight.T, out=product)
        main.wait_stream(side)
        return gated(product, pending, "silu", programmatic_launch=early)

    step(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(True)
    for _ in range(50):
        first, second = (torch.randn_like(x) for _ in range(2))
        x.copy_(first), hidden.copy_(second)
        expected = step(False)
        for stale in (product, delta, batch.workspace.planes):
            stale.fill_(float("nan"))
        x.copy_(first), hidden.copy_(second)
        graph.replay()
        assert torch.equal(out, expected)
