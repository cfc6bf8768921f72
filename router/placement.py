"""Which worker gets the next sequence. Pure."""

from collections.abc import Container, Iterable
from typing import Literal

import msgspec

Reason = Literal["resident", "loading", "admitted", "least_loaded"]

_TIERS: tuple[Reason, ...] = ("resident", "loading", "admitted", "least_loaded")


class WorkerView(msgspec.Struct, frozen=True):
    """What is known of a connected worker. Own counts first: a worker's status is late by nature.

    in_flight: sequences that this router has there. credits: how many it may have.
    resident, loading: digests on the worker's device, or on their way to it.
    admitted: digests that the worker has fetched and checked.
    load: sequences running and waiting there, whoever sent them.
    """

    worker_id: str
    ready: bool
    draining: bool
    in_flight: int
    credits: int
    load: int = 0
    resident: Container[str] = ()
    loading: Container[str] = ()
    admitted: Container[str] = ()

    @property
    def able(self) -> bool:
        return self.ready and not self.draining

    @property
    def has_room(self) -> bool:
        return self.able and self.in_flight < self.credits


def choose(views: Iterable[WorkerView], digest: str | None) -> tuple[str, Reason] | None:
    """The worker for a sequence of this adapter (None = base), and why. None: no worker has room.

    A worker that has the adapter on its device comes first, then one that is loading it, then one
    that has fetched it; within a tier the one with the least work, as a share of its credits.
    """
    best: tuple[tuple[int, float, int, str], Reason] | None = None
    for view in views:
        if not view.has_room:
            continue
        tier = _tier(view, digest)
        key = (tier, view.in_flight / view.credits, view.load, view.worker_id)
        if best is None or key < best[0]:
            best = (key, _TIERS[tier])
    return None if best is None else (best[0][3], best[1])


def choose_loader(views: Iterable[WorkerView]) -> str | None:
    """The worker to fetch an adapter whose digest is not known yet. Loading takes no credit."""
    able = [view for view in views if view.able]
    if not able:
        return None
    return min(
        able, key=lambda view: (view.in_flight / max(1, view.credits), view.worker_id)
    ).worker_id


def _tier(view: WorkerView, digest: str | None) -> int:
    if digest is None:
        return 3
    if digest in view.resident:
        return 0
    if digest in view.loading:
        return 1
    return 2 if digest in view.admitted else 3
