"""Slabs that come to the engine unasked: once each, and each comes back."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from loraplex.server.engine.begun import BegunSequences
from loraplex.server.engine.memory.residency import Placement
from loraplex.server.engine.messages import NeedSlab, SlabReleased, SlabStaged, Submit, ToEngine
from loraplex.server.protocol import ModelCard
from loraplex.server.worker.adapters.adapter_orders import AdapterOrders
from loraplex.server.worker.adapters.adapter_service import AdapterService
from loraplex.server.worker.adapters.staging import UNFORESEEN
from loraplex.server.worker.connections import RouterConnection
from loraplex.server.worker.known_engine import KnownEngine
from loraplex.server.worker.metrics import WorkerMetrics
from loraplex.server.worker.process.engine_supervisor import EngineSupervisor
from loraplex.server.worker.worker import Worker
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.server.engine.harness import limits, make_request
from tests.server.worker.slabs import EXTENT
from tests.server.worker.tiers import HOST_EXTENTS, Tiers

A, B = "a" * 64, "b" * 64


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """ "a" and "b" lie in host memory."""
    device = limits(arena_extents=4, adapter_slots=2, extent_bytes=EXTENT)
    options = CertifyOptions(device.vocab_size, device.eos_token_ids, ending_polls=1)
    tiers = Tiers(tmp_path, device, options)
    for digest in "ab":
        tiers.store(digest, 1)
        tiers.do(lambda digest=digest: tiers.tier.prefetch(digest))  # type: ignore[misc]
    settle(tiers)
    yield tiers
    settle(tiers)
    assert not tiers.handed_over
    assert not any(map(tiers.arena.leases, tiers.arena.ready))
    tiers.close()
    assert tiers.wrong == []


def settle(tiers: Tiers) -> None:
    for _ in range(12):
        tiers.round()


def sent(tiers: Tiers, kind: type[Any]) -> list[Any]:
    """Frames on their way, in either direction."""
    pipe = tiers.engine.pipe
    return [f for f in (*pipe.inbox, *pipe.outbox) if isinstance(f, kind)]


def answered(tiers: Tiers, key: int, adapter: str) -> bool:
    tokens = [t for event in tiers.events[key] for t in event.token_ids]
    return tokens == certified_output(adapter, [5, 6], len(tokens), tiers.options) != []


def test_what_lies_in_host_memory_comes_with_its_sequence(tiers: Tiers) -> None:
    tiers.submit(1, make_request([5, 6], 4, "a"))
    assert [type(frame) for frame in tiers.engine.pipe.inbox] == [Submit, SlabStaged]
    tiers.engine_turn()
    assert not sent(tiers, NeedSlab)
    settle(tiers)
    assert answered(tiers, 1, "a")


def test_a_question_that_crosses_the_slab_is_answered_by_it(tiers: Tiers) -> None:
    tiers.to_engine(Submit(1, make_request([5, 6], 4, "a")))
    tiers.live.add(1)
    tiers.engine_turn()
    assert sent(tiers, NeedSlab) == [NeedSlab("a")]
    tiers.submit(2, make_request([5, 6], 4, "a"))
    tiers.hear(9)
    tiers.turns(4)
    assert len(sent(tiers, SlabStaged)) == 1
    settle(tiers)
    assert answered(tiers, 1, "a")
    assert answered(tiers, 2, "a")


def test_what_nobody_needs_any_more_comes_back_and_can_be_asked_for(tiers: Tiers) -> None:
    tiers.submit(1, make_request([5, 6], 4, "a"))
    staged = tiers.engine.pipe.inbox.pop()
    tiers.abort(1)
    tiers.engine.pipe.inbox.append(staged)  # it is late
    tiers.engine_turn()
    assert sent(tiers, SlabReleased) == [SlabReleased("a", None)]
    tiers.submit(2, make_request([5, 6], 4, "a"))
    assert not sent(tiers, SlabStaged), "the first has not come back"
    tiers.engine_turn()
    assert sent(tiers, NeedSlab) == [NeedSlab("a")]
    settle(tiers)
    assert answered(tiers, 2, "a")


def test_what_was_given_up_is_no_load(tiers: Tiers) -> None:
    def load_s(digest: str) -> float | None:
        return tiers.orders.load_s(digest)

    tiers.do(lambda: tiers.push("a"))
    settle(tiers)
    assert not tiers.handed_over
    assert load_s("a") is None
    assert tiers.orders.load_bytes_s == 0
    tiers.submit(1, make_request([5, 6], 4, "a"))
    settle(tiers)
    assert load_s("a") is not None
    assert tiers.orders.load_bytes_s > 0


def test_what_lies_on_disk_is_not_pushed(tiers: Tiers) -> None:
    tiers.store("c", 1)
    tiers.do(lambda: tiers.wrong.extend(["pushed"] if tiers.staging.push("c") else []))
    tiers.submit(1, make_request([5, 6], 4, "c"))
    assert not sent(tiers, SlabStaged)
    settle(tiers)
    assert answered(tiers, 1, "c")


def test_what_is_on_its_way_from_disk_is_handed_over_once(tiers: Tiers) -> None:
    """It is there already, and who waits for it has not noticed."""
    tiers.store("c", 1)
    tiers.submit(1, make_request([5, 6], 4, "c"))
    tiers.engine_turn()
    tiers.hear(9)

    async def push_at_once() -> None:
        while tiers.tier.state("c") != "ready":
            for _ in range(len(tiers.threads.jobs)):
                tiers.end_job(0)
            await asyncio.sleep(0)
        assert not tiers.handed_over
        tiers.push("c")

    tiers.aio.run_until_complete(push_at_once())
    settle(tiers)
    assert answered(tiers, 1, "c")


@pytest.mark.parametrize("jobs", [0, 1], ids=["opening", "copying"])
def test_what_nobody_foresaw_ends_the_waiters_and_is_tried_again(tiers: Tiers, jobs: int) -> None:
    tiers.store("c", 2)
    tiers.failure = RuntimeError("can't start new thread")
    for key in (1, 2):
        tiers.to_engine(Submit(key, make_request([5, 6], 4, "c")))
        tiers.live.add(key)
        tiers.jobs_until_failure = jobs if key == 1 else None
        settle(tiers)
        assert not len(tiers.staging._tasks), "its task is left behind"
    assert [tiers.events[key][-1].message for key in (1, 2)] == [UNFORESEEN, None]
    assert answered(tiers, 2, "c")


def test_a_task_of_the_last_engine_leaves_the_next_ones_alone(tiers: Tiers) -> None:
    tiers.store("c", 1)
    tiers.submit(1, make_request([5, 6], 4, "c"))
    tiers.engine_turn()
    tiers.hear(9)
    tiers.restart_engine()  # its task has not noticed
    tiers.do(lambda: tiers.staging.need("c"))
    tiers.turns(3)
    assert len(tiers.staging._tasks) == 1
    settle(tiers)


def test_the_next_engine_gets_what_the_last_one_held(tiers: Tiers) -> None:
    tiers.submit(1, make_request([5, 6], 4, "a"))
    tiers.restart_engine()
    tiers.submit(2, make_request([5, 6], 4, "a"))
    assert len(sent(tiers, SlabStaged)) == 1
    settle(tiers)
    assert answered(tiers, 2, "a")


def test_preloads_without_room_leave_host_memory_to_a_cold_adapter(tiers: Tiers) -> None:
    """They fill it, and the device has room for the small one alone while the large one runs."""
    tiers.store("l", 3)
    tiers.submit(1, make_request([5, 6], 50, "l", ignore_eos=True))
    settle(tiers)
    for digest in "mn":
        tiers.store(digest, HOST_EXTENTS // 2)
        tiers.order(digest, "load", digest)
    settle(tiers)
    assert [tiers.arena.leases(digest) for digest in "mn"] == [1, 1]
    tiers.store("c", 1)
    tiers.submit(2, make_request([5, 6], 4, "c"))
    settle(tiers)
    assert answered(tiers, 2, "c")
    assert 1 in tiers.live
    for _ in range(5):
        settle(tiers)
    assert [tiers.reports[digest][0].error for digest in "mn"] == [None, None]


def test_a_burst_of_cold_adapters_beyond_host_memory_packs_each_once(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Counter[str]()
    place = tiers.arena.place

    def counted(digest: str, runs: Sequence[int], keep: Collection[str] = ()) -> Placement | None:
        placement = place(digest, runs, keep)
        placed[digest] += placement is not None
        return placement

    monkeypatch.setattr(tiers.arena, "place", counted)
    cold = [chr(ord("A") + number) for number in range(4 * HOST_EXTENTS)]
    for key, digest in enumerate(cold):
        tiers.store(digest, 1)
        tiers.submit(key, make_request([5, 6], 4, digest))
    for _ in range(20):
        settle(tiers)
    assert all(answered(tiers, key, digest) for key, digest in enumerate(cold))
    assert [placed[digest] for digest in cold] == [1] * len(cold)


class Supervisor:
    ready = True

    def __init__(self) -> None:
        self.frames: list[ToEngine] = []

    def send(self, frame: ToEngine) -> None:
        self.frames.append(frame)


class Connection:
    number = 1


def worker_over(tiers: Tiers, supervisor: Supervisor) -> Worker:
    card = ModelCard("0" * 64, ("m",), "{}", None, {}, (2,), 100, 64, "float32", "cpu", 8)
    service = cast(AdapterService, None)  # loads nothing here
    begun = BegunSequences(memoryview(bytearray(BegunSequences.NBYTES)))
    engine = KnownEngine(cast(EngineSupervisor, supervisor), begun)
    orders = AdapterOrders(tiers.tier, lambda _: True, tiers.threads, engine, lambda: tiers.now)
    worker = Worker(8, "w", card, engine, service, tiers.tier, orders, WorkerMetrics())
    worker.state = "ready"
    return worker


def test_an_engine_that_asked_for_a_slab_still_owes_a_step(tiers: Tiers) -> None:
    """What it holds may be what that slab waits for: were it excused, its hang would last."""
    tiers.store(A, 1)
    tiers.saved.add(A)
    supervisor = Supervisor()
    worker = worker_over(tiers, supervisor)
    assert not worker.engine_has_work()
    connection = cast(RouterConnection, Connection())
    tiers.do(lambda: worker.router_frame(connection, make_request([5, 6], 4, A)))
    tiers.do(lambda: worker.engine_frame(NeedSlab(A)))
    assert not [f for f in supervisor.frames if isinstance(f, SlabStaged)], "it is on its way"
    assert worker.engine_has_work()
    tiers.do(lambda: worker.engine_lost("it is over"))
    assert not worker.engine_has_work()


def test_the_worker_hands_over_what_a_sequence_will_miss(tiers: Tiers) -> None:
    for digest in (A, B):
        tiers.store(digest, 1)
        tiers.saved.add(digest)
        tiers.do(lambda digest=digest: tiers.tier.prefetch(digest))  # type: ignore[misc]
    settle(tiers)
    supervisor = Supervisor()
    worker = worker_over(tiers, supervisor)
    connection = cast(RouterConnection, Connection())
    for number, adapter in enumerate((A, A, None, B)):
        worker.router_frame(connection, make_request([5, 6], 4, adapter, request_id=str(number)))
    kinds = [type(frame) for frame in supervisor.frames]
    assert kinds == [Submit, SlabStaged, Submit, Submit, Submit, SlabStaged]
    assert [tiers.arena.leases(digest) for digest in (A, B)] == [1, 1]
    worker.engine_lost("it is over")
