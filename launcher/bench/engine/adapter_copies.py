"""An adapter's way from host memory to the device, with nothing else running. The engine's copies
are compared with one plain copy of the same bytes from the same memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from loraplex.adapters.manifest import SlabDtype
from loraplex.launcher.bench.engine.offline import EXTENT_BYTES, lora_layout
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.report import percentile
from loraplex.server.engine.executor import AdapterCopy, CopyOver
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.lora.adapter_copies import AdapterCopies
from loraplex.server.model.lora.arena_weights import DTYPES
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.lora.sites import Sites
from loraplex.server.model.spec.base_spec import base_spec

_ROUNDS = 4
_PLAIN_ROUNDS = 10
_POLL_S = 20e-6


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Of adapters of `mb` megabytes, packed. Milliseconds.

    plain: one copy of as many bytes from the same memory. transfer: that the bytes of an adapter
    are on their way. alone: from its order to its end, one at a time; queued: of each of many.
    times_plain: transfer over plain.
    """

    mb: float
    plain_ms: float
    plain_gb_s: float
    transfer_ms: float
    alone_p50_ms: float
    alone_p99_ms: float
    queued_ms: float
    times_plain: float


class _Tiers:
    """Adapters in host memory, as a worker has it, and a device with room for half of them.

    host: uint8 `[adapters * extents of one * EXTENT_BYTES]`, random; `dtype` is what slabs hold.
    """

    def __init__(
        self, folder: Path, device: torch.device, dtype: SlabDtype, lora_rank: int, adapters: int
    ) -> None:
        model = read_config(folder)
        base = base_spec(model, "0" * 64, ("base",))
        digests = [f"{number}".rjust(64, "0") for number in range(adapters)]
        self.layouts = [lora_layout(base, digest, lora_rank, dtype) for digest in digests]
        self.slots = max(1, adapters // 2)
        extents = sum(self.layouts[0].runs)
        self.memory = HostMemory(adapters * extents * EXTENT_BYTES)
        self.host = torch.frombuffer(self.memory.view, dtype=torch.uint8)
        self.host.random_()
        self.table = AdapterTable(
            Sites(model),
            slots=self.slots,
            extents=self.slots * extents,
            extent_bytes=EXTENT_BYTES,
            dtype=DTYPES[dtype],
            device=device,
        )
        self._on_device = AdapterArena(self.slots * extents, EXTENT_BYTES, self.slots)
        on_host = AdapterArena(adapters * extents, EXTENT_BYTES, adapters)
        self._held = [on_host.place(layout.digest, layout.runs) for layout in self.layouts]

    def order(self, number: int) -> AdapterCopy:
        """Of the adapter with this number, counted round; what is least used gives way."""
        number %= len(self.layouts)
        layout, held = self.layouts[number], self._held[number]
        if self._on_device.stage(layout.digest) == "ready":
            self._on_device.drop(layout.digest)
        placed = self._on_device.place(layout.digest, layout.runs)
        assert held is not None
        assert placed is not None
        self._on_device.finish(layout.digest)
        return AdapterCopy(placed.adapter_slot, layout, held.extents, placed.extents)


def measure(
    folder: Path, device: Literal["cpu", "cuda"], dtype: SlabDtype, lora_rank: int, adapters: int
) -> CopyTimes:
    """adapters: that lie in host memory."""
    tiers = _Tiers(folder, torch.device(device), dtype, lora_rank, adapters)
    copies = AdapterCopies(tiers.table, tiers.memory.view, lambda _: iter(()))
    alone: list[float] = []
    transfers: list[float] = []
    try:
        for number in range(_ROUNDS * adapters):
            copy = tiers.order(number)
            started = time.perf_counter()
            transfers += _run(copies, [copy])
            alone.append(time.perf_counter() - started)
        batch = [tiers.order(number) for number in range(tiers.slots)]
        started = time.perf_counter()
        _run(copies, batch)
        queued = (time.perf_counter() - started) / tiers.slots
        nbytes = tiers.layouts[0].nbytes
        plain = _plain_s(tiers.host[:nbytes], tiers.table.arena[:nbytes])
    finally:
        copies.close()
    transfer = percentile(transfers, 50)
    return CopyTimes(
        mb=nbytes / 1e6,
        plain_ms=1e3 * plain,
        plain_gb_s=nbytes / plain / 1e9,
        transfer_ms=1e3 * transfer,
        alone_p50_ms=1e3 * percentile(alone, 50),
        alone_p99_ms=1e3 * percentile(alone, 99),
        queued_ms=1e3 * queued,
        times_plain=transfer / plain,
    )


def _run(copies: AdapterCopies, orders: Sequence[AdapterCopy]) -> list[float]:
    """Seconds of each transfer. Raises BenchError for a copy that failed."""
    for order in orders:
        copies.start(order)
    seconds: list[float] = []
    while len(seconds) < len(orders):
        for news in copies.poll():
            if not isinstance(news, CopyOver):
                continue
            if news.error is not None:
                raise BenchError(f"a copy failed: {news.error}")
            seconds.append(news.copy_s)
        time.sleep(_POLL_S)
    return seconds


def _plain_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Of the fastest of a few. Both uint8 `[nbytes]`; the source is pinned by now."""
    best = float("inf")
    for _ in range(_PLAIN_ROUNDS):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if target.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best
