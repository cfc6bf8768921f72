"""A scheduler over a real executor, with adapters of PEFT: requests in, answers out."""

from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

import msgspec

from loraplex.server.engine.messages import SlabStaged
from loraplex.server.engine.plan import StepPlan
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.protocol import GenerateRequest
from tests.certifying.executor import FakeTicket
from tests.server.engine.harness import Harness
from tests.server.model.driver import Driver, Packed


class Plain:
    """An executor whose tickets know their plans. No request is constrained."""

    def __init__(self, driver: Driver) -> None:
        executor: Any = driver.executor
        self.launch_it, self.collect_it = executor.launch, executor.collect
        self.start_copy, self.copy_pages = executor.start_copy, executor.copy_pages
        self.start_picture, self.poll_pictures = executor.start_picture, executor.poll_pictures
        self.encode = executor.encode
        self._poll, self._devices = executor.poll_copies, driver.devices()

    def poll_copies(self) -> Any:
        """A harness does not wait: what threads do with files is done by then."""
        for device in self._devices:
            wait([fault for moving in device._pages._moving for fault in moving.faults])
        return self._poll()

    def launch(self, plan: StepPlan) -> FakeTicket:
        return FakeTicket(plan, self.launch_it(plan))

    def collect(self, ticket: FakeTicket) -> Any:
        return self.collect_it(ticket.results)


class Engine(Harness):
    """Requests name adapters by the digests of their slabs."""

    def __init__(
        self,
        driver: Driver,
        adapters: Mapping[str, Packed],
        depth: int = 1,
        max_draft: int = 0,
        **less: Any,
    ) -> None:
        """less: of limits, than the executor has."""
        config = SchedulerConfig(max_draft=max_draft)
        super().__init__(msgspec.structs.replace(driver.executor.limits, **less), depth, config)
        stored = driver.executor.stored_pages, driver.executor.stored_snapshots
        self.scheduler = Scheduler(self.limits, config, *stored) if any(stored) else self.scheduler
        self.executor = Plain(driver)  # type: ignore[assignment]
        self.driver = driver
        self.packed = {each.layout.digest: each for each in adapters.values()}
        self.next_extent = 0

    def stage(self, digest: str) -> None:
        self.needed.remove(digest)
        self.held.add(digest)
        packed = self.packed[digest]
        size, runs = packed.layout.extent_bytes, packed.layout.all_runs
        extents, read = [], 0
        for run in runs:
            extents.append(self.next_extent)
            piece = packed.slab[read * size : (read + run) * size]
            begin = self.next_extent * size
            self.driver.arena[begin : begin + len(piece)] = piece
            self.next_extent, read = self.next_extent + run, read + run
        self.scheduler.slab_staged(SlabStaged(packed.layout, tuple(extents)), self.now)
        self.exchange()

    def answers(self, *requests: GenerateRequest) -> list[list[int]]:
        """Asked together, in this order."""
        keys = [self.submit(request) for request in requests]
        self.run()
        assert all(self.last(key).finish == "length" for key in keys)
        return [self.tokens(key) for key in keys]

    @property
    def hits(self) -> int:
        """Tokens of prompts that were not computed."""
        return self.scheduler.stats().prefix_hit_tokens
