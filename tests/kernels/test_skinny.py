"""Products of few rows against torch's, in odd shapes, and in a chain whose kernels start early."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.kernels.launch.configs import (
    SkinnyConfig,
    SkinnyLoraConfig,
    load_configs,
    read_configs,
)
from loraplex.server.kernels.linear.skinny import MAX_ROWS, skinny_product
from loraplex.server.kernels.linear.skinny_lora import SkinnyLora, skinny_product_lora
from loraplex.server.kernels.linear.stack import allocate_stack, stack_rows
from loraplex.server.kernels.lora.workspace import allocate_workspace
from loraplex.server.kernels.pointwise.add_norm import add_norm
from tests.kernels.batches import NUM_SITES, SITE, Adapters, assert_close, interpreted
from tests.kernels.reference import lora_reference

ROW = SkinnyLoraConfig(4, 64, 4, 3, False, lora_programs=3, lora_splits=2)
FEW = SkinnyLoraConfig(16, 32, 2, 3, False, lora_programs=3, lora_splits=2)


def check(
    rows: int,
    out_features: int,
    features: int,
    dtype: torch.dtype,
    device: torch.device,
    config: SkinnyConfig,
) -> None:
    x = torch.randn(rows, features + 8).to(dtype).to(device)[:, :features]
    weight = (torch.randn(out_features, features) / features**0.5).to(dtype).to(device)
    bias = torch.randn(out_features).to(dtype).to(device)
    wide = torch.full((rows, out_features + 8), float("nan"), dtype=dtype, device=device)
    out = wide[:, :out_features]
    exact = x.float() @ weight.float().T
    skinny_product(x, weight, None, out, config)
    assert_close(out, exact, dtype)
    skinny_product(x, weight, bias, out, config)
    assert_close(out, exact + bias.float(), dtype)
    assert wide[:, out_features:].isnan().all()


@interpreted
@given(
    rows=st.integers(1, MAX_ROWS),
    out_features=st.integers(1, 70),
    features=st.integers(1, 150),
    dtype=st.sampled_from((torch.float32, torch.float16)),
)
@settings(max_examples=20)
def test_any_shape(rows: int, out_features: int, features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    config = ROW if rows == 1 else FEW
    check(rows, out_features, features, dtype, torch.device("cpu"), config)


def make_lora(adapters: Adapters, slots: Sequence[int], widths: tuple[int, ...]) -> SkinnyLora:
    """Of a workspace of NaN."""
    device, dtype = adapters.device, adapters.dtype
    workspace = allocate_workspace(len(slots), dtype, device, 8)
    workspace.planes.fill_(float("nan"))
    stack = allocate_stack(len(slots), NUM_SITES, dtype, device)
    of_rows = torch.tensor([*slots], dtype=torch.int32, device=device)
    return SkinnyLora(adapters.table, SITE, of_rows, widths, workspace, stack)


def stack_anew(lora: SkinnyLora) -> None:
    stack_rows(lora.slots, lora.stack, lora.table)


def check_lora(
    slots: Sequence[int],
    ranks: Sequence[tuple[int, ...]],
    widths: tuple[int, ...],
    features: int,
    dtype: torch.dtype,
    device: torch.device,
    config: SkinnyLoraConfig,
) -> None:
    """slots: of the rows; ranks: of each slot's adapter. Twice, as steps follow each other."""
    rows, total = len(slots), sum(widths)
    arena = sum(2 * (sum(r) * (features + total) + 1024) * dtype.itemsize for r in ranks)
    adapters = Adapters(dtype, device, len(ranks), arena_bytes=arena)
    for slot, of_adapter in enumerate(ranks):
        adapters.put(slot, features, widths, of_adapter)
    lora = make_lora(adapters, slots, widths)
    weight = (torch.randn(total, features) / features**0.5).to(dtype).to(device)
    bias, out = (torch.empty(*n, dtype=dtype, device=device) for n in ((total,), (rows, total)))
    for _ in range(2):
        x = torch.randn(rows, features).to(dtype).to(device)
        stack_anew(lora)
        out.fill_(float("nan")), bias.normal_()
        skinny_product_lora(x, weight, bias, out, config, lora)
        base = x.float() @ weight.float().T + bias.float()
        assert_close(out, lora_reference(base, x, slots, adapters.weights, widths), dtype)


@interpreted
@given(data=st.data())
@settings(max_examples=20)
def test_any_adapters(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9))
    widths = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    rank = st.one_of(st.sampled_from((0, 8, 16, 24)), st.integers(0, 40))
    ranks = data.draw(st.lists(st.tuples(*[rank] * len(widths)), min_size=1, max_size=4))
    slots = data.draw(st.lists(st.integers(-1, len(ranks) - 1), min_size=rows, max_size=rows))
    features = data.draw(st.integers(1, 150))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float16)))
    torch.manual_seed(rows)
    config = ROW if rows == 1 else FEW
    check_lora(slots, ranks, widths, features, dtype, torch.device("cpu"), config)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 32])
@pytest.mark.parametrize(("out_features", "features"), [(6144, 4096), (1000, 14336), (130, 72)])
def test_every_configuration(rows: int, out_features: int, features: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(rows)
    device = torch.device("cuda")
    for config in load_configs(device).skinny(rows):
        for dtype in (torch.bfloat16, torch.float16):
            check(rows, out_features, features, dtype, device, config)


MIXED: list[tuple[int, ...]] = [
    (16, 16, 16),
    (64, 8, 0),
    (5, 3, 40),
    (0, 256, 0),
    (0, 0, 0),
    (32, 32, 32),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "slots",
    [[0], [2], [4], [-1], [3, -1], [1, 1, 1], [0, 5, 1, -1, 4, 0, 1, 0], [*range(-1, 6), 2]],
)
@pytest.mark.parametrize("widths", [(4096, 1024, 1024), (1000, 130, 2)])
def test_adapters_on_a_gpu(slots: list[int], widths: tuple[int, ...]) -> None:
    """Ranks that are multiples of 8, and not."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(len(slots))
    device = torch.device("cuda")
    config = load_configs(device).skinny_lora(len(slots))
    assert config is not None
    for ranks in (MIXED, [(16, 8, 64)] * 6):
        for features in (4096, 1000):
            check_lora(slots, ranks, widths, features, torch.bfloat16, device, config)


def check_graph(
    step: Callable[[bool], None],
    x: torch.Tensor,
    hidden: torch.Tensor,
    stale: Sequence[torch.Tensor],
    before_each: Callable[[], None] = lambda: None,
) -> None:
    """step: of x in place, its kernels starting early or not: in a graph early as one by one, bit
    for bit, 50 times. stale: what it writes before it reads it."""
    step(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(True)
    for _ in range(50):
        start = torch.randn_like(x)
        before_each()
        x.copy_(start), hidden.zero_()
        step(False)
        expected = x.clone()
        for tensor in stale:
            tensor.fill_(float("nan"))
        x.copy_(start), hidden.zero_()
        graph.replay()
        assert torch.equal(x, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_lora_of_a_chain_in_a_graph(rows: int) -> None:
    """As `test_a_chain_in_a_graph_whose_kernels_start_early`, with other adapters each time."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(rows)
    device, dtype, features = torch.device("cuda"), torch.bfloat16, 4096
    config = load_configs(device).skinny_lora(rows)
    assert config is not None
    adapters = Adapters(dtype, device, 6, arena_bytes=1 << 27)
    for slot, ranks in enumerate(MIXED):
        for site in range(NUM_SITES):
            adapters.put(slot, features, (2048, 1024, 1024), ranks, site)
    first = make_lora(adapters, [-1] * rows, (2048, 1024, 1024))
    sites = [replace(first, site=site) for site in range(NUM_SITES)]
    weights = [torch.randn(features, features, dtype=dtype, device=device) / 64 for _ in sites]
    x, y, hidden = (torch.zeros(rows, features, dtype=dtype, device=device) for _ in range(3))
    norm = torch.ones(features, dtype=dtype, device=device)

    def step(early: bool) -> None:
        launched = replace(config, programmatic_launch=early)
        stack_anew(first)
        y.zero_()  # products read the stack before the kernel before them has ended
        for weight, lora in zip(weights, sites, strict=True):
            skinny_product_lora(x, weight, None, y, launched, lora)
            add_norm(y, None, hidden, (norm, 1e-5), programmatic_launch=early)
            skinny_product(y, weight, None, x, launched)

    def others() -> None:
        first.slots.copy_(torch.randint(-1, 6, (rows,)))

    check_graph(step, x, hidden, (y, first.workspace.planes), others)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_a_chain_in_a_graph_whose_kernels_start_early(rows: int) -> None:
    """Each starts before the one before it has ended: as one after the other, bit for bit."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(rows)
    device, dtype, features = torch.device("cuda"), torch.bfloat16, 4096
    config = load_configs(device).skinny(rows)[0]
    weights = [torch.randn(features, features, dtype=dtype, device=device) / 64 for _ in range(6)]
    x, y, hidden = (torch.zeros(rows, features, dtype=dtype, device=device) for _ in range(3))
    norm = torch.ones(features, dtype=dtype, device=device)

    def step(early: bool) -> None:
        launched = replace(config, programmatic_launch=early)
        for weight in weights:
            skinny_product(x, weight, None, y, launched)
            add_norm(y, None, hidden, (norm, 1e-5), programmatic_launch=early)
            skinny_product(y, weight, None, x, launched)

    check_graph(step, x, hidden, (y,))


def test_what_it_refuses() -> None:
    x, weight, out = torch.zeros(2, 32), torch.zeros(48, 32), torch.zeros(2, 48)
    refused: list[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], str]]
    refused = [
        ((torch.zeros(MAX_ROWS + 1, 32), weight, None, out), "33 rows, not 1 to 32"),
        ((x[:0], weight, None, out), "0 rows"),
        ((x[:, :8], weight, None, out), "do not fit"),
        ((x, weight, None, out[:1]), "do not fit"),
        ((x, torch.zeros(32, 48).T, None, out), "contiguous"),
        ((torch.zeros(32, 2).T, weight, None, out), "contiguous"),
        ((x, weight.half(), None, out), "weight torch.float16"),
        ((x, weight, torch.zeros(47), out), r"bias is .*\[47\], for 48"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            skinny_product(*arguments, FEW)


def test_what_lora_of_it_refuses() -> None:
    device = torch.device("cpu")
    adapters = Adapters(torch.float32, device, 1)
    x, weight, out = torch.zeros(2, 32), torch.zeros(48, 32), torch.zeros(2, 48)
    lora = make_lora(adapters, [0, -1], (32, 16))
    few = allocate_workspace(1, torch.float32, device, 8)
    half = allocate_workspace(2, torch.float16, device, 8)
    one_split = allocate_workspace(2, torch.float32, device, 1)
    refused = [
        (replace(lora, site=NUM_SITES), f"site {NUM_SITES} is not in"),
        (replace(lora, slots=lora.slots[:1]), r"slots are torch.int32 \[1\], 2 rows"),
        (replace(lora, slots=lora.slots.long()), "slots are torch.int64"),
        (replace(lora, widths=(32, 15)), "do not add up to 48"),
        (replace(lora, workspace=few), "a workspace of 1 rows"),
        (replace(lora, workspace=half), "rows of torch.float16, x is torch.float32"),
        (replace(lora, workspace=one_split), "2 splits, a workspace of 1"),
        (replace(lora, stack=allocate_stack(1, NUM_SITES, x.dtype, device)), "a stack of 1 rows"),
        (replace(lora, stack=allocate_stack(2, 1, x.dtype, device)), "and 1 sites"),
    ]
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            skinny_product_lora(x, weight, None, out, replace(FEW, block_k=16), wrong)
    with pytest.raises(ValueError, match="without programs that shrink"):
        skinny_product_lora(x, weight, None, out, replace(FEW, lora_programs=0), lora)
    with pytest.raises(ValueError, match="do not fit"):
        skinny_product_lora(x, weight, None, out[:1], FEW, lora)


@pytest.mark.parametrize(("arch", "shared_bytes"), [("sm90", 227 << 10), ("default", 99 << 10)])
def test_configurations_fit_their_rows_and_device(arch: str, shared_bytes: int) -> None:
    """shared_bytes: of the architectures that a file serves, the least that a program can have."""
    configs = read_configs(arch, 40, programmatic_launch=True)
    for rows in range(1, MAX_ROWS + 1):
        of_lora = configs.skinny_lora(rows)
        assert of_lora is None or (0 < of_lora.lora_programs <= 40 and of_lora.lora_splits > 0)
        for config in (*configs.skinny(rows), *([of_lora] if of_lora else [])):
            assert config.block_n >= (1 if rows == 1 else 16)
            assert config.block_n & (config.block_n - 1) == 0
            assert config.block_k & (config.block_k - 1) == 0
            step_bytes = 2 * config.block_k * (config.block_n + max(rows, 8))
            assert config.num_stages * step_bytes < shared_bytes
    assert configs.skinny(MAX_ROWS + 1) == ()
