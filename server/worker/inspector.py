"""A worker's picture for the console: both arenas and its counters.

It receives changes and is asked at most once a second; it decides nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from loraplex.server.engine.memory.residency import Span, each
from loraplex.server.engine.messages import AdapterPlaced, EngineReady, EngineStats, StepOutput
from loraplex.server.protocol import AdapterPlace, Inspect, WorkerPicture
from loraplex.server.worker.adapters.adapter_orders import AdapterOrders
from loraplex.server.worker.adapters.host_tier import HostTier

MAX_PLACES = 4096
KeptPages = tuple[Literal["host", "disk"], int, int]


class DevicePlaces:
    """Places of adapters on the device, as the engine reports each placement.

    What is overwritten is gone, so at most one adapter is remembered for each extent.
    """

    def __init__(self) -> None:
        self._spans: dict[str, tuple[Span, ...]] = {}
        self._owners: dict[int, str] = {}  # of each extent

    def spans(self, digest: str) -> tuple[Span, ...]:
        return self._spans.get(digest, ())

    def placed(self, placed: AdapterPlaced) -> None:
        self.left(placed.digest)
        for extent in each(placed.spans):
            if extent in self._owners:
                self.left(self._owners[extent])
            self._owners[extent] = placed.digest
        self._spans[placed.digest] = placed.spans

    def left(self, digest: str) -> None:
        """Another lies in its place, or the engine asks for its bytes: it has none there."""
        for extent in each(self._spans.pop(digest, ())):
            del self._owners[extent]

    def clear(self) -> None:
        self._spans.clear()
        self._owners.clear()


def _kept_pages(ready: EngineReady, stats: EngineStats) -> Iterator[KeptPages]:
    """Pages below the device, as of `WorkerPicture.kept_pages`."""
    if ready.host_pages:
        yield "host", stats.swaps.host, ready.host_pages
    if ready.disk_pages:
        yield "disk", stats.swaps.disk, ready.disk_pages


class Inspector:
    """A picture of the worker, which `picture` gives; other methods hear what happens."""

    def __init__(self, tier: HostTier, orders: AdapterOrders) -> None:
        self._tier = tier
        self._orders = orders
        self._ready = EngineReady(0, 0, 0, 0, 0, 0, "", "")
        self.device = DevicePlaces()
        self._output_tokens = 0
        self._restarts = 0
        self._places: tuple[AdapterPlace, ...] = ()
        self._left_out = 0
        self._version = 1

    # ---- the engine

    def engine_ready(self, ready: EngineReady) -> None:
        self._ready = ready
        self._output_tokens = 0

    def engine_lost(self) -> None:
        self.device.clear()
        self._restarts += 1

    def stepped(self, output: StepOutput) -> None:
        self._output_tokens += sum(len(item.event.token_ids) for item in output.events)

    # ---- the picture

    def picture(
        self,
        asked: Inspect,
        stats: EngineStats,
        resident: frozenset[str],
        in_use: Mapping[str, int],
    ) -> WorkerPicture:
        self._look(resident, frozenset(stats.loading))
        ready = self._ready
        return WorkerPicture(
            order_id=asked.order_id,
            device=ready.device,
            page_size=ready.page_size,
            extent_bytes=ready.extent_bytes,
            device_extents=ready.arena_bytes // max(1, ready.extent_bytes),
            host_extents=self._tier.extents,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=self._output_tokens,
            evictions=sum(stats.evictions.values()),
            preemptions=stats.preemptions,
            restarts=self._restarts,
            in_use=tuple(in_use.items())[:MAX_PLACES],
            version=self._version,
            places=None if asked.known == self._version else self._places,
            places_left_out=self._left_out,
            shards=ready.shards,
            memory=tuple(line[:2] for line in ready.memory if line.where == "device"),
            kept_pages=tuple(_kept_pages(ready, stats)),
            draft_tokens=stats.draft_tokens,
            accepted_draft_tokens=stats.accepted_draft_tokens,
        )

    def _look(self, resident: frozenset[str], loading: frozenset[str]) -> None:
        """Look at places. Adapters on the device come before those in host memory alone."""
        known = dict.fromkeys((*resident, *loading, *reversed(self._tier.digests)))
        on_device = resident | loading
        shown = list(known)[:MAX_PLACES]
        self._left_out = len(known) - len(shown)
        pins = self._orders.pins
        places = tuple(
            AdapterPlace(
                digest,
                "ready" if digest in resident else "loading" if digest in loading else "absent",
                self._tier.state(digest),
                digest in pins,
                self._tier.slab_bytes(digest),
                self._orders.load_s(digest),
                self.device.spans(digest) if digest in on_device else (),
                self._tier.spans(digest),
            )
            for digest in sorted(shown)
        )
        if places != self._places:
            self._places = places
            self._version += 1
