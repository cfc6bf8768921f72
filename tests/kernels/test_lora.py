"""Shrink and expand against the reference: awkward sizes, ranks, batches; graphs; determinism."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from loraplex.server.kernels.launch.configs import Phase, load_configs
from loraplex.server.kernels.lora.expand import expand
from loraplex.server.kernels.lora.segments import MAX_FUSED_ROWS, route
from loraplex.server.kernels.lora.shrink import gather_embedding, shrink
from tests.grids import sparse
from tests.kernels.batches import SITE, Adapters, assert_close, make_batch
from tests.kernels.reference import embed_reference, lora_reference

RANKS = (1, 3, 8, 24, 64, 100)


def dtypes(device: torch.device) -> Sequence[torch.dtype]:
    """The interpreter computes bf16 products in numpy, which has no bf16: GPU only."""
    if device.type == "cpu":
        return torch.float32, torch.float16
    return torch.float32, torch.float16, torch.bfloat16


def check(
    adapters: Adapters,
    slots: Sequence[int],
    in_features: int,
    widths: Sequence[int],
    phase: Phase = "decode",
) -> None:
    batch = make_batch(len(slots), adapters, phase, whole=len(slots) > MAX_FUSED_ROWS)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x = torch.randn(len(slots), in_features).to(adapters.dtype).to(adapters.device)
    y = torch.randn(len(slots), sum(widths)).to(adapters.dtype).to(adapters.device)
    before = y.clone()
    expected = lora_reference(y, x, slots, adapters.weights, widths)
    batch.run(y, x, widths, adapters.table)
    assert_close(y, expected, adapters.dtype)
    for row, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(y[row], before[row])


@pytest.mark.parametrize(
    ("rows", "features"),
    sparse(
        [1, 3, 17, 77], [(64, (64,)), (96, (200, 72, 72)), (200, (130, 130)), (77, (65, 33, 1))]
    ),
)
def test_mixed_ranks(
    device: torch.device, rows: int, features: tuple[int, tuple[int, ...]]
) -> None:
    """features: in, and out of each projection."""
    in_features, widths = features
    torch.manual_seed(rows)
    rng = random.Random(rows)
    for dtype in dtypes(device):
        adapters = Adapters(dtype, device, 6)
        for slot in range(6):
            adapters.put(slot, in_features, widths, rng.sample(RANKS, len(widths)))
        check(adapters, [rng.randrange(-1, 6) for _ in range(rows)], in_features, widths)


LARGE = [
    (torch.bfloat16, 256, 40), (torch.bfloat16, 256, 1), (torch.bfloat16, 128, 3),
    (torch.bfloat16, 33, 40), (torch.bfloat16, 1, 40), (torch.bfloat16, 1000, 40),
    (torch.float16, 33, 40), (torch.float32, 33, 40),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("widths", "in_features"), [((4096, 1024, 1024), 4096), ((4096,), 14336)])
@pytest.mark.parametrize(("dtype", "rows", "most"), LARGE)
def test_large_shapes(
    dtype: torch.dtype, rows: int, most: int, widths: tuple[int, ...], in_features: int
) -> None:
    """Several splits of K, several blocks of columns, and more items than programs."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and too slow for the interpreter")
    torch.manual_seed(0)
    rng = random.Random(0)
    adapters = Adapters(dtype, torch.device("cuda"), 40, arena_bytes=1 << 29)
    for slot in range(40):
        ranks = [rng.choice((8, 16, 32, 64, 128, 256)) for _ in widths]
        adapters.put(slot, in_features, widths, ranks)
    slots = [rng.randrange(-1 if rows > 1 else 0, most) for _ in range(rows)]
    phases: Sequence[Phase] = ("mixed", "prefill") if rows > 256 else ("decode", "mixed")
    for phase in phases:
        check(adapters, slots, in_features, widths, phase)


@pytest.mark.parametrize("ranks", [(16, 0, 0), (0, 8, 0), (0, 0, 3), (0, 24, 64)])
def test_rank_zero_projections_are_not_touched(
    device: torch.device, ranks: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    widths = (64, 48, 40)
    adapters = Adapters(torch.float32, device, 2)
    adapters.put(0, 96, widths, ranks)
    check(adapters, [0, 1, -1, 0, 1], 96, widths)
    batch = make_batch(3, adapters)
    batch.slots.zero_()
    x, y = torch.randn(3, 96, device=device), torch.full((3, 152), float("nan"), device=device)
    y[:, : widths[0]] = 1.0
    batch.run(y, x, widths, adapters.table)
    if ranks[0] == 0:
        assert (y[:, : widths[0]] == 1.0).all()
    for column, rank in ((64, ranks[1]), (112, ranks[2])):
        assert y[:, column].isnan().all() or rank > 0


@pytest.mark.parametrize(
    ("phase", "ranks"), sparse(["decode", "mixed", "prefill"], [(256, 256, 256), (200, 1, 5)])
)
def test_largest_and_odd_ranks(device: torch.device, ranks: tuple[int, ...], phase: Phase) -> None:
    """The first fill a row of the workspace to its end."""
    torch.manual_seed(9)
    adapters = Adapters(torch.float32, device, 2)
    adapters.put(0, 64, (40, 24, 16), ranks)
    adapters.put(1, 64, (40, 24, 16), ranks[::-1])
    check(adapters, [0, 1, -1, 1, 1], 64, (40, 24, 16), phase)


@pytest.mark.parametrize("slots", [[-1] * 5, [], [2] * 20, list(range(20))])
def test_shapes_of_batches(device: torch.device, slots: list[int]) -> None:
    """No adapter, no row, one adapter for all, each row its own."""
    torch.manual_seed(2)
    adapters = Adapters(torch.float32, device, 20)
    for slot in range(20):
        adapters.put(slot, 80, (64, 64), (RANKS[slot % 6], 4))
    check(adapters, slots, 80, (64, 64))


def test_long_prefill(device: torch.device) -> None:
    """More rows than the routing kernel takes, in runs as prompts come."""
    torch.manual_seed(3)
    adapters = Adapters(torch.float32, device, 3)
    for slot, rank in enumerate((8, 24, 64)):
        adapters.put(slot, 64, (48,), (rank,))
    check(adapters, [0] * 300 + [-1] * 40 + [2] * 150 + [0] * 50 + [1] * 3, 64, (48,), "prefill")


@pytest.mark.parametrize(
    ("phase", "ranks"), sparse(["decode", "mixed", "prefill"], [(16, 8), (24, 40), (3, 100)])
)
def test_tiles_of_every_length(device: torch.device, ranks: tuple[int, ...], phase: Phase) -> None:
    """One row, few, as many as a small tile has, and what is left of a long run: each has code of
    its own."""
    torch.manual_seed(10)
    lengths = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 90)
    for dtype in dtypes(device):
        adapters = Adapters(dtype, device, len(lengths))
        slots = [-1]
        for slot, length in enumerate(lengths):
            adapters.put(slot, 72, (70, 40), ranks)
            slots += [slot] * length
        check(adapters, slots, 72, (70, 40), phase)


@pytest.mark.parametrize(
    ("phase", "ranks"), sparse(["decode", "mixed"], [(8, 64), (16, 40), (24, 16), (80, 8)])
)
def test_whole_steps(device: torch.device, ranks: tuple[int, int], phase: Phase) -> None:
    """Where features and columns end with a step nothing is masked: not of the narrow pieces of
    tiles that are shared out, either."""
    torch.manual_seed(12)
    for dtype in dtypes(device):
        adapters = Adapters(dtype, device, 3)
        for slot in range(3):
            adapters.put(slot, 512, (512, 256), ranks[:: 1 if slot else -1])
        check(adapters, [0, 1, 1, -1] + [2] * 11, 512, (512, 256), phase)


def test_strided_rows(device: torch.device) -> None:
    """x and y may be column slices of wider tensors; what lies beside y is not written."""
    torch.manual_seed(4)
    adapters = Adapters(torch.float32, device, 1)
    adapters.put(0, 96, (64,), (8,))
    batch = make_batch(4, adapters)
    batch.slots.zero_()
    x = torch.randn(4, 200, device=device)[:, 50:146]
    wide = torch.zeros(4, 192, device=device)
    batch.run(wide[:, 64:128], x, (64,), adapters.table)
    expected = lora_reference(torch.zeros_like(wide[:, :64]), x, [0] * 4, adapters.weights, (64,))
    assert_close(wide[:, 64:128], expected, torch.float32)
    assert (wide[:, :64] == 0).all()
    assert (wide[:, 128:] == 0).all()


def test_a_cleared_slot_touches_nothing(device: torch.device) -> None:
    """Its blocks may hold anything by then: here NaN."""
    torch.manual_seed(5)
    adapters = Adapters(torch.float32, device, 2)
    adapters.put(0, 64, (64,), (8,))
    freed = adapters.used
    adapters.put(1, 64, (64,), (16,))
    adapters.remove(0)
    adapters.arena[:freed] = 0xFF
    check(adapters, [0, 1, 0, -1], 64, (64,))


def test_embedding(device: torch.device) -> None:
    torch.manual_seed(6)
    adapters = Adapters(torch.float32, device, 3)
    for slot, rank in enumerate((3, 16, 104)):
        adapters.put_embedding(slot, 50, 72, rank)
    slots = [0, 1, 2, -1, 2, 2, 0]
    tokens = torch.randint(0, 50, (7,), dtype=torch.int32, device=device)
    batch = make_batch(7, adapters)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    y = torch.randn(7, 72, device=device)
    expected = embed_reference(y, tokens.tolist(), slots, adapters.weights)
    route(batch.slots, batch.segments, adapters.table)
    gather_embedding(tokens, adapters.table, SITE, batch.segments, batch.workspace)
    config = load_configs(device).expand("decode", 7)
    expand(y, (72,), adapters.table, SITE, batch.segments, batch.workspace, config)
    assert_close(y, expected, torch.float32)


@pytest.mark.parametrize("split", [3, 5])
def test_splits_that_do_not_divide_k(device: torch.device, split: int) -> None:
    """Single rows and tiles step through K differently; both must stop at the split's end."""
    torch.manual_seed(10)
    adapters = Adapters(torch.float32, device, 3)
    for slot, rank in enumerate((8, 72, 16)):
        adapters.put(slot, 1900, (64,), (rank,))
    slots = [0, 1, 2, 2, 2]
    batch = make_batch(5, adapters)
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x, y = torch.randn(5, 1900, device=device), torch.zeros(5, 64, device=device)
    configs = load_configs(device)
    for block_k in (64, 256):
        y.zero_()
        config = replace(configs.shrink("decode", 5), max_split=split, block_k=block_k)
        route(batch.slots, batch.segments, adapters.table)
        shrink(x, adapters.table, SITE, batch.segments, batch.workspace, config)
        config_e = configs.expand("decode", 5)
        expand(y, (64,), adapters.table, SITE, batch.segments, batch.workspace, config_e)
        expected = lora_reference(torch.zeros_like(y), x, slots, adapters.weights, (64,))
        assert_close(y, expected, torch.float32)


@pytest.mark.gpu
def test_graph_replays_with_other_adapters() -> None:
    """One capture serves any assignment, any ranks; two replays of one step are bitwise equal."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(7)
    rng = random.Random(7)
    device, widths, rows = torch.device("cuda"), (512, 128, 128), 48
    adapters = Adapters(torch.bfloat16, device, 48, arena_bytes=1 << 28)
    for slot in range(24):
        adapters.put(slot, 1024, widths, [rng.choice(RANKS) for _ in widths])
    batch = make_batch(rows, adapters)
    x = torch.randn(rows, 1024, dtype=torch.bfloat16, device=device)
    y = torch.zeros(rows, 768, dtype=torch.bfloat16, device=device)
    batch.run(y, x, widths, adapters.table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run(y, x, widths, adapters.table)
    for count in (1, 2, 5, 24, 48, 0):
        for slot in range(24, count):
            adapters.put(slot, 1024, widths, [rng.choice((*RANKS, 0)) for _ in widths])
        slots = [rng.randrange(count) if count else -1 for _ in range(rows)]
        batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        x.normal_()
        outputs = []
        for _ in range(2):
            y.zero_()
            graph.replay()
            outputs.append(y.clone())
        assert torch.equal(outputs[0], outputs[1])
        expected = lora_reference(torch.zeros_like(y), x, slots, adapters.weights, widths)
        assert_close(y, expected, torch.bfloat16)


@pytest.mark.gpu
def test_expand_after_a_gemm_on_another_stream() -> None:
    """Shrink on a side stream beside the base GEMM; expand starts while the GEMM drains."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(8)
    device, widths, rows = torch.device("cuda"), (4096, 1024, 1024), 64
    adapters = Adapters(torch.bfloat16, device, 16, arena_bytes=1 << 28)
    for slot in range(16):
        adapters.put(slot, 4096, widths, (16, 64, 8))
    batch = make_batch(rows, adapters)
    slots = [i % 17 - 1 for i in range(rows)]
    batch.slots.copy_(torch.tensor(slots, dtype=torch.int32))
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=device)
    weight = torch.randn(6144, 4096, dtype=torch.bfloat16, device=device) / 64
    y = torch.empty(rows, 6144, dtype=torch.bfloat16, device=device)
    configs = load_configs(device)
    shrink_config = configs.shrink("decode", rows)
    expand_config = configs.expand("decode", rows)
    side = torch.cuda.Stream()

    def step() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            shrink(x, adapters.table, SITE, batch.segments, batch.workspace, shrink_config)
        torch.mm(x, weight.T, out=y)
        torch.cuda.current_stream().wait_stream(side)
        expand(
            y, widths, adapters.table, SITE, batch.segments, batch.workspace, expand_config,
            after_gemm=True,
        )  # fmt: skip

    route(batch.slots, batch.segments, adapters.table)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            step()
    expected = lora_reference(x @ weight.T, x, slots, adapters.weights, widths)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert_close(y, expected, torch.bfloat16)
