"""Any order of what can happen to adapters between disk, host arena and device arena."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from loraplex.server.protocol import GenerateRequest, OrderAction
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.grids import beyond
from tests.server.engine.harness import limits, make_request
from tests.server.invariants import check_arena
from tests.server.worker.slabs import EXTENT
from tests.server.worker.tiers import HOST_EXTENTS, ROUTER, Tiers, holds

# Extents of each name's slabs; the host holds six, the device four or five. "g" fits nowhere.
SIZES = {"a": 1, "b": 1, "c": 2, "d": 2, "e": 3, "f": 4, "g": 7}
VERSIONS = 8
MAX_ROUNDS = 300
NAMES = st.sampled_from(sorted(SIZES))
ROUNDS = st.integers(1, 3)
FAILURES = [
    OSError("the disk failed"),
    MemoryError(),
    RuntimeError("can't start new thread"),
]
ACTIONS = st.sampled_from(["load", "evict", "tiers"])


class Ordered(NamedTuple):
    action: OrderAction
    digest: str


class TiersMachine(RuleBasedStateMachine):
    """A digest is one character, and so is every byte of its slab."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.versions = dict.fromkeys(SIZES, 0)
        self.requests: dict[int, GenerateRequest] = {}
        self.orders: list[Ordered] = []
        self.withdrawn: set[str] = set()
        self.heard: set[str] = set()  # orders whose report was looked at
        self.ever_pinned: set[str] = set()
        self.restarts: list[int] = []  # how many orders there were by then
        self.pinned_on_device: set[str] = set()

    @initialize(
        extents=st.integers(4, 5),
        slots=st.integers(2, 3),
        polls=st.integers(1, 2),
        ending=st.integers(0, 2),
    )
    def begin(self, extents: int, slots: int, polls: int, ending: int) -> None:
        device = limits(arena_extents=extents, adapter_slots=slots, extent_bytes=EXTENT)
        self.options = CertifyOptions(
            device.vocab_size, device.eos_token_ids, copy_polls=polls, ending_polls=ending
        )
        self.tiers = Tiers(Path(self.folder.name), device, self.options)
        for name in SIZES:
            self.fetch(name)

    def digest(self, name: str, age: int = 0) -> str:
        """Of its present content, or of an older one."""
        version = max(0, self.versions[name] - age)
        return chr(ord("0") + sorted(SIZES).index(name) * VERSIONS + version)

    # ---- what routers do

    @rule(
        name=st.sampled_from(["", *SIZES]),
        age=st.integers(0, 1),
        count=st.integers(1, 12),
        deadline_s=st.sampled_from([None, None, None, 0.05]),
    )
    def submit(self, name: str, age: int, count: int, deadline_s: float | None) -> None:
        key = len(self.requests)
        adapter = self.digest(name, age) if name else None
        request = make_request([5, 6, 7 + key % 3], count, adapter, deadline_s=deadline_s)
        self.requests[key] = request
        self.tiers.submit(key, request)

    @precondition(lambda self: self.tiers.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.tiers.abort(data.draw(st.sampled_from(sorted(self.tiers.live))))

    @rule(names=st.sets(NAMES, max_size=3))
    def hint(self, names: set[str]) -> None:
        digests = [self.digest(name) for name in sorted(names)]
        self.tiers.do(lambda: self.tiers.tier.hint(digests))

    @rule(names=st.sets(NAMES, max_size=2))
    def pin(self, names: set[str]) -> None:
        """And unpin what is not among them."""
        digests = [self.digest(name) for name in sorted(names)]
        self.ever_pinned.update(digests)
        self.tiers.do(lambda: self.tiers.orders.pin(ROUTER, digests))

    @rule(name=NAMES, age=st.integers(0, 1), action=ACTIONS, same=st.booleans())
    def order(self, name: str, age: int, action: OrderAction, same: bool) -> None:
        """same: as the last order, which may be under way."""
        digest = self.orders[-1].digest if same and self.orders else self.digest(name, age)
        self.orders.append(Ordered(action, digest))
        self.tiers.order(str(len(self.orders) - 1), action, digest)

    @precondition(lambda self: any(o.action == "load" for o in self.orders))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Its router waits no more, whether it was answered or not."""
        loads = [str(n) for n, ordered in enumerate(self.orders) if ordered.action == "load"]
        order_id = data.draw(st.sampled_from(loads))
        self.withdrawn.add(order_id)
        self.tiers.order(order_id, "withdraw")

    @rule(name=NAMES)
    def refresh(self, name: str) -> None:
        """From now on its name means other content; what runs goes on with the old."""
        if self.versions[name] + 1 < VERSIONS:
            self.versions[name] += 1
            self.fetch(name)

    # ---- what disks, copies, engines and time do

    def fetch(self, name: str) -> None:
        self.tiers.store(self.digest(name), SIZES[name])

    @rule(name=NAMES, age=st.integers(0, 1), comes=st.booleans())
    def content(self, name: str, age: int, comes: bool) -> None:
        """It leaves the disk, or is fetched again."""
        if comes:
            self.tiers.store(self.digest(name, age), SIZES[name])
        else:
            self.tiers.forget(self.digest(name, age))

    @precondition(lambda self: self.on_their_way())
    @rule(data=st.data())
    def content_on_its_way(self, data: st.DataObject) -> None:
        """It leaves the disk while it is being staged."""
        self.tiers.forget(data.draw(st.sampled_from(self.on_their_way())))

    def on_their_way(self) -> list[str]:
        digests = [self.digest(name, age) for name in sorted(SIZES) for age in (0, 1)]
        return [digest for digest in digests if self.tiers.tier.state(digest) == "loading"]

    @precondition(lambda self: self.tiers.threads.jobs)
    @rule(data=st.data())
    def job(self, data: st.DataObject) -> None:
        self.tiers.end_job(data.draw(st.integers(0, len(self.tiers.threads.jobs) - 1)))

    @rule(after=st.integers(0, 5), failure=st.sampled_from(FAILURES))
    def job_will_fail(self, after: int, failure: Exception) -> None:
        """In opening a slab or reading its bytes."""
        self.tiers.jobs_until_failure = after
        self.tiers.failure = failure

    @precondition(lambda self: self.tiers.engine.executor.copying)
    @rule(data=st.data(), over=st.booleans())
    def copy(self, data: st.DataObject, over: bool) -> None:
        """It will be usable, or over, too."""
        executor = self.tiers.engine.executor
        marked = executor.ending if over else executor.nearing
        marked.add(data.draw(st.sampled_from(sorted(executor.copying))))

    @rule(name=NAMES, age=st.integers(0, 1))
    def push(self, name: str, age: int) -> None:
        """Of what lies in host memory, whether somebody needs it or not."""
        digest = self.digest(name, age)
        if self.tiers.tier.state(digest) == "ready":
            self.tiers.do(lambda: self.tiers.push(digest))

    @rule()
    def copy_will_fail(self) -> None:
        """The next one that would become usable."""
        self.tiers.engine.executor.fail_next = True

    @rule(count=st.integers(1, 4))
    def turns(self, count: int) -> None:
        self.tiers.turns(count)

    @rule(count=st.integers(1, 4))
    def hear(self, count: int) -> None:
        self.tiers.hear(count)

    @rule(count=st.integers(1, 4))
    def engine_turns(self, count: int) -> None:
        for _ in range(count):
            self.tiers.engine_turn()

    @rule(seconds=st.sampled_from([0.04, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.tiers.now += seconds

    @rule(count=ROUNDS)
    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.tiers.round()

    @precondition(lambda self: len(self.requests) > 3)
    @rule()
    def restart_engine(self) -> None:
        self.tiers.restart_engine()
        self.restarts.append(len(self.orders))
        self.pinned_on_device.clear()

    # ---- what must hold whenever nothing is in the middle of a call

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "tiers"):
            self.nothing_was_wrong()
            self.extents_are_conserved()
            self.what_is_ready_is_whole()
            self.what_is_leased_stays()
            self.host_leases_are_those_of_the_engine()
            self.what_is_pinned_stays_on_the_device()
            self.orders_fail_for_a_reason()

    def nothing_was_wrong(self) -> None:
        assert self.tiers.wrong == []

    def extents_are_conserved(self) -> None:
        for arena in (self.tiers.arena, self.tiers.engine.scheduler.arena):
            check_arena(arena)
            assert arena.used_bytes + arena.free_extents * EXTENT == arena.num_extents * EXTENT
        assert self.tiers.tier.used_bytes <= HOST_EXTENTS * EXTENT

    def what_is_ready_is_whole(self) -> None:
        host, device = self.tiers.arena, self.tiers.engine.scheduler.arena
        for digest in host.ready:
            for first, count in host.spans(digest):
                places = range(first, first + count)
                assert all(holds(self.tiers.memory, x, digest) for x in places)
        memory = self.tiers.engine.executor.extents
        for digest in device.ready:
            for first, count in device.spans(digest):
                assert memory[first : first + count] == [digest] * count

    def what_is_leased_stays(self) -> None:
        host, scheduler = self.tiers.arena, self.tiers.engine.scheduler
        for digest, staged in self.tiers.handed_over.items():
            placement = host.placement(digest)
            assert host.leases(digest) == 1, "the engine may read it"
            assert placement is not None
            assert placement.extents == staged.extents, "moved while the engine may read it"
        for sequence in scheduler._running:
            if sequence.adapter is not None:
                placement = scheduler.arena.placement(sequence.adapter)
                assert scheduler.arena.leases(sequence.adapter) > 0
                assert placement is not None
                assert placement.adapter_slot == sequence.adapter_slot

    def host_leases_are_those_of_the_engine(self) -> None:
        """One for each slab that it was handed and that has not come back."""
        host = self.tiers.arena
        assert {d for d in host.ready if host.leases(d)} == set(self.tiers.handed_over)

    def what_is_pinned_stays_on_the_device(self) -> None:
        arena = self.tiers.engine.scheduler.arena
        here = arena.pins & {*arena.ready}
        assert self.pinned_on_device & arena.pins <= here
        self.pinned_on_device = set(here)

    def orders_fail_for_a_reason(self) -> None:
        """For one that came after them, or for what became of the engine, the disk or the room."""
        for number, ordered in enumerate(self.orders):
            reports = self.tiers.reports[str(number)]
            if str(number) in self.heard or not reports:
                continue
            self.heard.add(str(number))
            error, since = reports[0].error, self.orders[number + 1 :]
            if error is None:
                continue
            reason = f"{ordered} of {self.orders}: {error}"
            if error == "it was evicted meanwhile":
                assert ordered.action == "load", reason
                assert Ordered("evict", ordered.digest) in since, reason
            elif error == "it was loaded again meanwhile":
                assert ordered.action == "evict", reason
                assert Ordered("load", ordered.digest) in since, reason
            elif error in ("the adapter is pinned", "a router has it pinned"):
                assert ordered.action == "evict", reason
                assert ordered.digest in self.ever_pinned, reason
            elif error == "the engine was lost":
                assert ordered.action == "load", reason
                assert any(at > number for at in self.restarts), reason
            else:
                assert ordered.action == "load", reason
                assert self.may_not_come(ordered.digest, error), reason

    def may_not_come(self, digest: str, message: str) -> bool:
        """Whether that may be why an adapter does not come to the device."""
        known = (f"no {digest}", "of adapter memory", "adapter slots hold pinned adapters")
        if any(reason in message for reason in known):
            return True
        return (message, digest) in self.tiers.broken

    # ---- the end

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            try:
                self.come_to_rest()
                for key, request in self.requests.items():
                    self.check_answer(key, request)
            finally:
                self.tiers.close()
        self.folder.cleanup()

    def come_to_rest(self) -> None:
        tiers = self.tiers
        rounds = 0
        while not self.is_at_rest():
            tiers.round()
            rounds += 1
            assert rounds < MAX_ROUNDS, f"somebody waits for ever: {self.state()}"
        self.nothing_was_wrong()
        on_device = set(tiers.engine.scheduler.arena.ready)
        assert set(tiers._resident) == on_device, "the worker knows of changes alone"
        for order_id, reports in tiers.reports.items():
            assert len(reports) == 1 or (not reports and order_id in self.withdrawn)
        for arena in (tiers.arena, tiers.engine.scheduler.arena):
            assert not any(map(arena.leases, arena.ready)), "a lease was lost"

    def state(self) -> str:
        tiers = self.tiers
        loads = tiers.engine.scheduler.loads
        return str(
            {
                "live": tiers.live,
                "host": {d: tiers.arena.leases(d) for d in tiers.arena.ready},
                "on its way there": tiers.arena.loading,
                "device": loads.arena.ready,
                "on its way to the device": loads.loading,
                "handed_over": list(tiers.handed_over),
                "staging": len(tiers.staging._tasks),
                "orders": self.unanswered(),
            }
        )

    def unanswered(self) -> list[str]:
        reports = self.tiers.reports
        return [name for name in reports if not reports[name] and name not in self.withdrawn]

    def is_at_rest(self) -> bool:
        tiers = self.tiers
        engine = tiers.engine
        return not (
            tiers.live
            or tiers.threads.jobs
            or len(tiers.staging._tasks)
            or tiers.handed_over
            or engine.pipe.inbox
            or engine.pipe.outbox
            or engine.executor.copying
            or tiers.arena.loading
            or engine.scheduler.arena.loading
            or self.unanswered()
        )

    def check_answer(self, key: int, request: GenerateRequest) -> None:
        *_, last = self.tiers.events[key]
        assert [e.finish for e in self.tiers.events[key] if e.finish is not None] == [last.finish]
        tokens = [t for event in self.tiers.events[key] for t in event.token_ids]
        count = request.sampling.max_tokens
        whole = certified_output(request.adapter, request.prompt_ids, count, self.options)
        assert tokens == whole[: len(tokens)]
        if last.finish == "length":
            assert tokens == whole
        assert last.error in (None, "adapter_unavailable", "deadline", "engine_lost")
        if last.error == "adapter_unavailable":
            assert self.may_not_come(request.adapter or "", last.message or ""), last


@pytest.mark.parametrize("examples", beyond(1, [60, 400]))
def test_tiers(examples: int) -> None:
    run_state_machine_as_test(
        TiersMachine, settings=settings(max_examples=examples, stateful_step_count=50)
    )
