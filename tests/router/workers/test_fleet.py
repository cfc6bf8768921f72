"""Credits between those who wait for one and those who left; a worker that reads nothing."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from websockets.asyncio.client import ClientConnection

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.router.names.served import Origin
from loraplex.router.policy.placement.placement import PlacementRequest, WorkerView
from loraplex.router.policy.queue.queue_limits import QueueLimits
from loraplex.router.policy.queue.waiting import Waiting, WaitingQueue
from loraplex.router.workers import session as worker_session
from loraplex.router.workers.client import WorkerClient
from loraplex.router.workers.fleet import Fleet, Placed, Roster
from loraplex.router.workers.loads import Supply
from loraplex.router.workers.session import WorkerLost, WorkerSession
from loraplex.server.protocol import (
    Evidence,
    GenerateRequest,
    SamplingParams,
    TokenEvent,
    WorkerHello,
    WorkerStatus,
)

ENTRY: Waiting[None] = Waiting(None, "", PlacementRequest(""), 10, 10, 360)


class OneCredit:
    """The session of a worker with room for one sequence."""

    worker_id = "w"

    def __init__(self, fleet: Fleet) -> None:
        self.view = WorkerView("w", ready=True, credits=1)
        self.session = self
        self._fleet = fleet

    def give_back(self, adapter: str) -> None:
        self.view.leave(adapter)
        self._fleet.worker_changed()


async def test_many_may_leave_at_once() -> None:
    """More than Python's stack is deep; the credit goes to the one who stayed."""
    roster = Roster()
    queue: WaitingQueue[asyncio.Future[Placed]] = WaitingQueue(QueueLimits(4096, 1 << 30))
    fleet = Fleet(queue, roster, 10.0, 1.0, lambda count: None, asyncio.Event())
    worker = OneCredit(fleet)
    roster.clients = (cast(WorkerClient, worker),)
    first = await fleet.acquire(ENTRY)
    leaving = [asyncio.create_task(fleet.acquire(ENTRY)) for _ in range(2000)]
    staying = asyncio.create_task(fleet.acquire(ENTRY))
    await asyncio.sleep(0)
    assert len(fleet.queue) == 2001
    for task in leaving:
        task.cancel()
    first.bill.settle()
    first.credit.release()  # none of them has run again: all are still in the queue
    last = await staying
    assert (len(fleet.queue), worker.view.in_flight) == (0, 1)
    for task in leaving:
        with pytest.raises(asyncio.CancelledError):
            await task
    last.bill.settle()
    last.credit.release()
    assert worker.view.in_flight == 0
    assert not worker.view.own


class Loader:
    """The session of a worker that loads adapters, or is lost as it does."""

    def __init__(self, fleet: Fleet, name: str, *, is_lost: bool = False) -> None:
        self.view = WorkerView(name, ready=True, credits=1)
        self.session: Loader | None = self
        self._fleet, self._is_lost = fleet, is_lost
        self.died = asyncio.Event()

    async def load(self, origin: Origin, token: None) -> str:
        if not self._is_lost:
            return "loaded"
        self.session = None
        self._fleet.worker_changed()
        self.died.set()
        raise WorkerLost("it died")


async def test_a_load_whose_workers_die_waits_for_another() -> None:
    roster = Roster()
    queue: WaitingQueue[asyncio.Future[Placed]] = WaitingQueue(QueueLimits(4096, 1 << 30))
    fleet = Fleet(queue, roster, 60.0, 1.0, lambda count: None, asyncio.Event())
    dying = tuple(Loader(fleet, name, is_lost=True) for name in ("a", "b"))
    roster.clients = cast(tuple[WorkerClient, ...], dying)
    load = asyncio.create_task(fleet.load_adapter(AdapterRef("local", "it"), None))
    for worker in dying:
        await worker.died.wait()
    assert not load.done()
    roster.clients = (cast(WorkerClient, Loader(fleet, "c")),)
    fleet.worker_changed()
    assert cast(str, await load) == "loaded"


async def test_a_load_without_a_worker_fails_when_none_comes() -> None:
    queue: WaitingQueue[asyncio.Future[Placed]] = WaitingQueue(QueueLimits(4096, 1 << 30))
    fleet = Fleet(queue, Roster(), 0.01, 1.0, lambda count: None, asyncio.Event())
    with pytest.raises(AdapterError, match="no worker is ready") as raised:
        await fleet.load_adapter(AdapterRef("local", "it"), None)
    assert raised.value.code == "unavailable"


def session_over(socket: object) -> WorkerSession:
    hello = WorkerHello("w", 1, "0" * 64, 64)
    supply, bring = cast(Supply, None), cast(worker_session.Bring, None)
    return WorkerSession(cast(ClientConnection, socket), hello, lambda: None, supply, bring)


def asked_for(session: WorkerSession, *names: str) -> list[TokenEvent]:
    """Events of sequences with these names, from now on."""
    events: list[TokenEvent] = []
    for name in names:
        request = GenerateRequest(name, 0, 0, None, [1], [], SamplingParams(), 1)
        session.submit(request, events.append, lambda cost: None)
    return events


async def test_a_silent_engine_is_held_against_what_it_had_begun() -> None:
    session = session_over(None)
    events = asked_for(session, "waiting", "begun", "got on")
    known: tuple[tuple[str, int, int, Evidence], ...]
    known = (("waiting", 0, 0, "none"), ("begun", 0, 0, "strong"), ("ended", 0, 0, "weak"))
    session.status = WorkerStatus(
        *("w", 1, "0" * 64, False, False, 1, 1, 2, 1, (), (), 7), silent=True, evidence=known
    )
    assert session.hand_over("it is silent") == 3
    assert {event.error for event in events} == {"engine_lost"}
    assert [event.evidence for event in events] == ["none", "strong", "weak"]


async def test_a_worker_that_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot even get the order to stop: its sequences go on elsewhere all the same."""
    aborted = asyncio.Event()
    session = session_over(SimpleNamespace(transport=SimpleNamespace(abort=aborted.set)))
    events = asked_for(session, "r")
    monkeypatch.setattr(worker_session, "MAX_OUTBOX_BYTES", 0)
    assert session.hand_over("it is silent") == 1
    assert [event.error for event in events] == ["unheard"]
    assert aborted.is_set()
