"""Adapters in an arena full of NaN, the table that points to them, and buffers for a batch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.kernels.launch.configs import KernelConfigs, Phase, load_configs, read_configs
from loraplex.server.kernels.lora.expand import expand
from loraplex.server.kernels.lora.segments import Segments, allocate_segments, route
from loraplex.server.kernels.lora.shrink import shrink
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.workspace import Workspace, allocate_workspace
from tests.kernels.reference import SiteTensors

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels on the CPU need TRITON_INTERPRET=1"
)
on_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)
ALIGNMENT = 256
NUM_SITES = 3
SITE = 1


def sloped(rule: ScoreRule, heads: int, largest: float | None, device: torch.device) -> ScoreRule:
    """The rule with random slopes. largest: None = without."""
    if largest is None:
        return rule
    return replace(rule, slopes=largest * torch.rand(heads).to(device))


@dataclass(slots=True)
class Adapters:
    """Random adapters by slot, of one site. `arena` is NaN wherever no weight lies."""

    dtype: torch.dtype
    device: torch.device
    num_slots: int
    arena_bytes: int = 4 << 20
    used: int = 0
    arena: torch.Tensor = field(init=False)
    table: LoraTable = field(init=False)
    weights: list[SiteTensors | None] = field(init=False)

    def __post_init__(self) -> None:
        self.arena = torch.full((self.arena_bytes,), 0xFF, dtype=torch.uint8, device=self.device)
        assert self.arena.view(self.dtype).isnan().all()
        self.table = LoraTable(NUM_SITES, self.num_slots, self.device)
        self.weights = [None] * self.num_slots

    def put(
        self,
        slot: int,
        in_features: int,
        widths: Sequence[int],
        ranks: Sequence[int],
        site: int = SITE,
        *,
        scales: Sequence[float] | None = None,
        b_size: float = 1.0,
    ) -> None:
        """A: `[sum(ranks), in]` stacked, B: `[width, rank]` each, as a slab has them. `weights`
        tells of the last site put."""
        a_ptr, stacked = self._place(torch.randn(sum(ranks), in_features) / in_features**0.5)
        placed = [
            self._place(b_size * torch.randn(w, r) / max(r, 1) ** 0.5)
            for w, r in zip(widths, ranks, strict=True)
        ]
        scales = scales or [0.5 + 0.25 * i for i in range(len(ranks))]
        self.table.write(slot, site, a_ptr, [p for p, _ in placed], ranks, scales)
        self.table.upload(slot)
        a = tuple(stacked.split(list(ranks)))
        self.weights[slot] = SiteTensors(a, tuple(b for _, b in placed), tuple(scales))

    def put_embedding(self, slot: int, vocab: int, width: int, rank: int) -> None:
        """A: `[vocab, rank]`, the transpose of what PEFT stores."""
        a_ptr, a = self._place(torch.randn(vocab, rank))
        b_ptr, b = self._place(torch.randn(width, rank) / rank**0.5)
        self.table.write(slot, SITE, a_ptr, [b_ptr], [rank], [2.0])
        self.table.upload(slot)
        self.weights[slot] = SiteTensors((a.T,), (b,), (2.0,))

    def remove(self, slot: int) -> None:
        self.table.clear(slot)
        self.table.upload(slot)
        self.weights[slot] = None

    def _place(self, values: torch.Tensor) -> tuple[int, torch.Tensor]:
        values = values.to(self.dtype)
        nbytes = values.numel() * values.element_size()
        assert self.used + nbytes <= self.arena_bytes
        view = self.arena[self.used : self.used + nbytes].view(self.dtype).view(values.shape)
        view.copy_(values)
        address = self.arena.data_ptr() + self.used
        self.used += -(-(nbytes + 1) // ALIGNMENT) * ALIGNMENT
        return address, view.clone()


def launch_configs(device: torch.device, phase: Phase) -> KernelConfigs:
    """As served there; for the CPU of mixed steps an H100's, whose tiles are no other phase's, with
    all its processors, since work is cut by their number."""
    if device.type == "cpu" and phase == "mixed":
        return read_configs("sm90", 132, programmatic_launch=False)
    return load_configs(device)


@dataclass(slots=True)
class Batch:
    """Static buffers for batches of one size, as an executor owns them."""

    segments: Segments
    workspace: Workspace
    slots: torch.Tensor
    phase: Phase

    def run(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        widths: Sequence[int],
        table: LoraTable,
        accumulate: bool = True,
    ) -> None:
        configs = launch_configs(x.device, self.phase)
        rows = self.segments.rows
        shrink_config = configs.shrink(self.phase, rows)
        expand_config = configs.expand(self.phase, rows)
        route(self.slots, self.segments, table)
        shrink(x, table, SITE, self.segments, self.workspace, shrink_config)
        context = (table, SITE, self.segments, self.workspace, expand_config)
        expand(y, widths, *context, accumulate=accumulate, after_gemm=True)


def make_batch(
    rows: int, adapters: Adapters, phase: Phase = "decode", *, whole: bool = False
) -> Batch:
    """whole: tiles are not shared out, as those of prompts never are."""
    configs = launch_configs(adapters.device, phase)
    tile_rows = configs.tile_rows(phase, rows)
    shared = not whole and phase == "decode"
    sizes = (rows, tile_rows, adapters.num_slots)
    segments = allocate_segments(*sizes, adapters.device, shared=shared)
    split = configs.max_split(phase, rows)
    workspace = allocate_workspace(max(rows, 1), adapters.dtype, adapters.device, split)
    workspace.planes.fill_(float("nan"))
    slots = torch.full((rows,), -1, dtype=torch.int32, device=adapters.device)
    return Batch(segments, workspace, slots, phase)


def assert_close(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative Frobenius error within what `dtype` inputs and a `dtype` bridge can give."""
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    out, ref = out.float().cpu(), ref.float().cpu()
    assert out.isfinite().all()
    error = float((out - ref).norm() / ref.norm().clamp_min(1e-9))
    assert error < limit, f"relative error {error:.2e}, limit {limit:.0e}"
