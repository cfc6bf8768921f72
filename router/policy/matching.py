"""Matches waiting sequences with workers: turns and placement, put together. Pure."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from loraplex.router.policy.placement.placement import MISSES, Decision, Placer, WorkerView
from loraplex.router.policy.queue.waiting import Bill, Waiting, WaitingQueue, load_price

T = TypeVar("T")


class Match(NamedTuple, Generic[T]):
    """A sequence has left the queue for a worker. bill: what it is charged from here on."""

    entry: Waiting[T]
    decision: Decision
    bill: Bill


class Matcher(Generic[T]):
    """The queue and its placement."""

    def __init__(self, queue: WaitingQueue[T], placement: Placer) -> None:
        self.queue = queue
        self.placement = placement
        self.holds = False

    def next(self, workers: Sequence[WorkerView], now: float) -> Match[T] | None:
        """The next match, carried out; None = nobody can be placed now.

        Then `holds` says whether somebody only waits for a worker that has its adapter: `next` is
        to be asked again soon, even if nothing happens.
        """
        self.holds = False
        with_room = [worker for worker in workers if worker.has_room] if len(self.queue) else []
        if not with_room:
            return None
        self.queue.shares.rows = sum(worker.size for worker in workers if worker.able)
        to_spare = [worker for worker in with_room if worker.has_spare]
        for ticket, entry, held_s in self.queue.candidates(now):
            # Who has more than its share leaves some rows of each worker to the others.
            usable = to_spare if self.queue.shares.is_over(entry.tenant) else with_room
            if avoid := entry.request.avoid:
                usable = [worker for worker in usable if worker.worker_id not in avoid]
            if not usable:
                continue
            decision = self.placement.choose(entry.request, workers, usable, now, held_s)
            if decision is None:
                self.queue.hold(ticket, now)
                self.holds = True
                continue
            price = load_price(entry.request.nbytes) if decision.reason in MISSES else 0.0
            bill = self.queue.take(ticket, now, price)
            self.placement.place(entry.request, decision, now)
            return Match(entry, decision, bill)
        return None
