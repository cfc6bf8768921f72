"""LoRA time of one decode step of Llama-3.1-8B's shapes, alone and over the base's GEMMs.

Random weights are made on the GPU. Every time is of one CUDA graph. The floor is the bytes of the
batch's distinct adapters at the same run's copy bandwidth.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from loraplex.launcher.bench.commands import print_points
from loraplex.launcher.bench.engine.grid import Point, copy_bandwidth, drive
from loraplex.launcher.bench.engine.offline import require_cuda
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import whole
from loraplex.server.kernels.attention.decode_attention import (
    DecodeBatchView,
    DecodeScratch,
    LayerScores,
    decode_attention,
)
from loraplex.server.kernels.attention.decode_work import WorkLayout
from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.kernels.attention.rope_append import Rotation
from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.kernels.launch.configs import KernelConfigs, load_configs
from loraplex.server.kernels.linear.skinny_lora import SkinnyLora, skinny_product_lora
from loraplex.server.kernels.linear.stack import stack_rows
from loraplex.server.kernels.lora.expand import expand
from loraplex.server.kernels.lora.pending import PendingDelta
from loraplex.server.kernels.lora.segments import allocate_segments, route
from loraplex.server.kernels.lora.shrink import shrink
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.workspace import allocate_workspace
from loraplex.server.kernels.pointwise.add_norm import add_norm
from loraplex.server.kernels.pointwise.gated import gated
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.ops.cuda.device_lora import FusedKernel, fused_kernel
from loraplex.server.model.ops.cuda.lora_linear import Products

LAYERS = 32
SITES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
)
GATE_UP = 2
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE = 4096, 32, 8, 128, 16
POINTS = (
    (1, 1), (8, 8), (32, 1), (32, 32), (64, 64), (128, 128), (256, 1), (256, 64), (256, 256),
)  # fmt: skip
MIX = 0  # stands for a rank where adapters have several
RANKS: dict[int, tuple[int, ...]] = {16: (16,), 64: (64,), MIX: (8, 16, 32, 64)}
BUDGET_FACTOR, BUDGET_MS = 1.25, 0.25
NUM_SLOTS = 256
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class LoraTimes:
    """Milliseconds of one step's LoRA. Alone: shrink and expand of every site, None where GEMMs
    have LoRA fused. Added to the base: over each GEMM and the kernel that reads its output, as the
    engine runs them. Both None: the adapters do not fit into the device's memory."""

    B: int
    D: int
    r: int | str
    floor_ms: float
    budget_ms: float
    alone_ms: float | None
    base_ms: float
    added_ms: float | None


class Adapters:
    """Random adapters of given ranks in device memory."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.count = len(ranks)
        # As many slots as an engine would have: the graph is then valid for any assignment.
        self.table = LoraTable(LAYERS * len(SITES), NUM_SLOTS, "cuda")
        self._arenas = [
            torch.empty(adapter_bytes(rank) // DTYPE.itemsize, dtype=DTYPE, device="cuda")
            for rank in ranks
        ]
        for slot, rank in enumerate(ranks):
            self._fill(slot, rank)

    def _fill(self, slot: int, rank: int) -> None:
        address = self._arenas[slot].normal_(std=0.01).data_ptr()
        for index in range(LAYERS * len(SITES)):
            k, widths = SITES[index % len(SITES)]
            pointers = [address, address + 2 * k * rank * len(widths)]
            for width in widths:
                pointers.append(pointers[-1] + 2 * width * rank)
            address = pointers.pop()
            n = len(widths)
            self.table.write(slot, index, pointers[0], pointers[1:], [rank] * n, [2.0] * n)
        self.table.upload(slot)


def adapter_bytes(rank: int) -> int:
    per_layer = sum(len(widths) * k + sum(widths) for k, widths in SITES) * rank
    return LAYERS * per_layer * DTYPE.itemsize


class TimedStep:
    """One decode step's GEMMs, the kernels that read their outputs, and LoRA, at a batch size."""

    def __init__(
        self,
        batch: int,
        weights: list[torch.Tensor],
        configs: KernelConfigs,
        products: Products,
    ) -> None:
        self.batch = batch
        self.weights = weights
        self.products = products
        self.configs = configs
        self.slots = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
        tile_rows = configs.tile_rows("decode", batch)
        self.segments = allocate_segments(batch, tile_rows, NUM_SLOTS, "cuda", shared=True)
        max_split = configs.max_split("decode", batch)
        self.workspace = allocate_workspace(batch, DTYPE, "cuda", max_split)
        self.inputs = {k: torch.randn(batch, k, dtype=DTYPE, device="cuda") for k, _ in SITES}
        self.outputs = [
            torch.zeros(batch, sum(widths), dtype=DTYPE, device="cuda") for _, widths in SITES
        ]
        self.hidden = torch.zeros_like(self.inputs[HIDDEN])
        self.deltas = [torch.zeros_like(y) for y in self.outputs]
        self.norm = (torch.ones(HIDDEN, dtype=DTYPE, device="cuda"), 1e-6)
        self.attention = _Attention(batch)
        self.side = torch.cuda.Stream()
        # Of few rows products have their LoRA on the way.
        self.few = fused_kernel(configs, batch, len(weights), DTYPE, torch.device("cuda"))

    def base(self) -> None:
        self._begin()
        for index in range(len(self.weights)):
            self._gemm(index)
            self._take_up(index, None)

    def alone(self, adapters: Adapters) -> None:
        route(self.slots, self.segments, adapters.table)
        for index in range(len(self.weights)):
            self._shrink(index, adapters)
            self._expand(index, adapters, self.outputs[index % len(SITES)], True)

    def with_lora(self, adapters: Adapters) -> None:
        """Runs what `server.model.ops.cuda.ops_cuda` runs in a captured step of decodes."""
        if self.few is not None:
            stack_rows(self.slots, self.few.stack, adapters.table)
            self._begin()
            for index in range(len(self.weights)):
                self._product_with_lora(index, adapters, self.few)
                self._take_up(index, None)
            return
        route(self.slots, self.segments, adapters.table)
        self._begin()
        main = torch.cuda.current_stream()
        for index in range(len(self.weights)):
            self.side.wait_stream(main)
            self._shrink(index, adapters, after_input=True)
            self._expand(index, adapters, self.deltas[index % len(SITES)], False)
            with torch.cuda.stream(self.side):
                self._gemm(index, beside_lora=True)
            main.wait_stream(self.side)
            self._take_up(index, adapters.table)

    def _product_with_lora(self, index: int, adapters: Adapters, few: FusedKernel) -> None:
        k, widths = SITES[index % len(SITES)]
        lora = SkinnyLora(adapters.table, index, self.slots, widths, self.workspace, few.stack)
        out = self.outputs[index % len(SITES)]
        skinny_product_lora(self.inputs[k], self.weights[index], None, out, few.config, lora)

    def assign(self, distinct: int) -> None:
        """Spreads the batch's rows over adapters 0 .. distinct-1."""
        self.slots.copy_(torch.arange(self.batch, dtype=torch.int32) % distinct)

    def _gemm(self, index: int, *, beside_lora: bool = False) -> None:
        k, _ = SITES[index % len(SITES)]
        out = self.outputs[index % len(SITES)]
        linear = DenseLinear(self.weights[index])
        self.products.linear(self.inputs[k], linear, out, beside_lora=beside_lora)

    def _shrink(self, index: int, adapters: Adapters, *, after_input: bool = False) -> None:
        k, _ = SITES[index % len(SITES)]
        config = self.configs.shrink("decode", self.batch)
        context = (adapters.table, index, self.segments, self.workspace, config)
        shrink(self.inputs[k], *context, after_input=after_input)

    def _expand(self, index: int, adapters: Adapters, y: torch.Tensor, accumulate: bool) -> None:
        _, widths = SITES[index % len(SITES)]
        config = self.configs.expand("decode", self.batch)
        context = (adapters.table, index, self.segments, self.workspace, config)
        expand(y, widths, *context, accumulate=accumulate, after_gemm=True)

    def _begin(self) -> None:
        """Runs a step's first norm, which writes the input of the first product."""
        early = self.configs.programmatic_launch
        add_norm(self.outputs[1], None, self.hidden, self.norm, programmatic_launch=early)

    def _take_up(self, index: int, table: LoraTable | None) -> None:
        site = index % len(SITES)
        y, early = self.outputs[site], self.configs.programmatic_launch
        delta = None
        if table is not None:
            delta = PendingDelta(table, index, self.slots, self.deltas[site])
        if site == 0:
            self.attention.run(y, delta, early)
        elif site == GATE_UP:
            gated(y, delta, "silu", programmatic_launch=early)
        else:
            add_norm(y, delta, self.hidden, self.norm, programmatic_launch=early)


class _Attention:
    """Attention over contexts of one page."""

    def __init__(self, batch: int) -> None:
        layout = WorkLayout((None,), batch)
        packed = np.zeros(layout.length, dtype=np.int32)
        layout.cut(np.full(batch, PAGE), packed)
        work = layout.items(torch.from_numpy(packed).cuda())
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        positions = torch.full((batch,), PAGE - 1, device="cuda")
        self.view = DecodeBatchView(rows, positions, rows[:, None].long(), work)
        shape = (batch, PAGE, KV_HEADS, HEAD_DIM)
        self.cache = CachePages(
            torch.randn(shape, dtype=DTYPE, device="cuda"),
            torch.randn(shape, dtype=DTYPE, device="cuda"),
        )
        self.rotation = Rotation(torch.randn(PAGE, HEAD_DIM, device="cuda"))
        device = torch.device("cuda")
        self.scratch = DecodeScratch(batch, HEADS, HEAD_DIM, device)
        self.out = torch.empty(batch, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")

    def run(self, qkv: torch.Tensor, pending: PendingDelta | None, early: bool) -> None:
        scores = LayerScores(ScoreRule(HEAD_DIM**-0.5))
        context = (self.view, self.cache, self.rotation, None, scores, self.scratch, self.out)
        decode_attention(qkv, pending, *context, programmatic_launch=early)


def graph_ms(step: Callable[[], object], replays: int) -> float:
    """Median time of a replay of the graph of `step`."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return median_ms(graph.replay, replays)


def median_ms(run: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    return float(statistics.median(times))


def make_weights() -> list[torch.Tensor]:
    return [
        torch.empty(sum(widths), k, dtype=DTYPE, device="cuda").normal_(std=0.01)
        for _ in range(LAYERS)
        for k, widths in SITES
    ]


def measure(
    sizes: Sequence[tuple[int, int]], ranks: Sequence[int], replays: int
) -> Iterator[LoraTimes]:
    """Measures batches with so many adapters. ranks: keys of RANKS. Raises BenchError where the
    device has no memory for the products."""
    try:
        bandwidth, steps = copy_bandwidth("cuda"), _steps(sorted({batch for batch, _ in sizes}))
        base = {batch: graph_ms(step.base, replays) for batch, step in steps.items()}
    except torch.OutOfMemoryError:
        raise BenchError("bench lora-kernels needs a GPU with 16 GB of free memory") from None
    made: list[Adapters | None] = []

    def bring(distinct: int, rank: int) -> None:
        made.clear()
        torch.cuda.empty_cache()
        made.append(_made(_ranks(distinct, rank)))

    def times(point: Point) -> Iterator[LoraTimes]:
        floor = 1e3 * sum(map(adapter_bytes, _ranks(point.adapters, point.rank))) / bandwidth
        before = base[point.batch]
        alone, added = _lora_ms(steps[point.batch], before, made[0], replays)
        yield LoraTimes(
            B=point.batch,
            D=point.adapters,
            r=point.rank if point.rank != MIX else "mix",
            floor_ms=round(floor, 4),
            budget_ms=round(BUDGET_FACTOR * floor + BUDGET_MS, 4),
            alone_ms=alone,
            base_ms=round(before, 4),
            added_ms=added,
        )

    points = [Point(batch, distinct, rank) for batch, distinct in sizes for rank in ranks]
    points.sort(key=lambda point: (point.adapters, ranks.index(point.rank), point.batch))
    yield from drive(points, bring, times)


def _ranks(distinct: int, rank: int) -> list[int]:
    """Gives each of the adapters one of the ranks, by turns."""
    return [RANKS[rank][i % len(RANKS[rank])] for i in range(distinct)]


def _steps(batches: Sequence[int]) -> dict[int, TimedStep]:
    configs, weights = load_configs("cuda"), make_weights()
    products = Products(configs)
    by_site = [weights[site :: len(SITES)] for site in range(len(SITES))]
    products.measure(batches, [list(map(DenseLinear, of)) for of in by_site])
    return {batch: TimedStep(batch, weights, configs, products) for batch in batches}


def _made(ranks: Sequence[int]) -> Adapters | None:
    try:
        return Adapters(ranks)
    except torch.OutOfMemoryError:
        return None


def _lora_ms(
    step: TimedStep, base: float, adapters: Adapters | None, replays: int
) -> tuple[float | None, float | None]:
    """Milliseconds of LoRA alone, and added to the step's `base`."""
    if adapters is None:
        return None, None
    step.assign(adapters.count)
    alone = None if step.few else round(graph_ms(partial(step.alone, adapters), replays), 4)
    added = graph_ms(partial(step.with_lora, adapters), replays) - base
    return alone, round(added, 4)


def add_arguments(parser: Parser) -> None:
    """Adds the ranks and the number of replays."""
    parser.add_argument("--rank", action="append", choices=("16", "64", "mix"))
    parser.add_argument("--replays", type=whole(1), default=20)


def run(arguments: argparse.Namespace) -> None:
    """Raises BenchError."""
    require_cuda("bench lora-kernels needs one")
    named = {"16": 16, "64": 64, "mix": MIX}
    ranks = [named[text] for text in arguments.rank or named]
    print_points(measure(POINTS, ranks, arguments.replays), arguments.json)
