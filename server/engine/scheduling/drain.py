"""Adapters in use that run dry, so that one which waits for room gets it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from server.engine.memory.residency import AdapterArena
from server.engine.scheduling.sequence import Order, Sequence


@dataclass(frozen=True, slots=True)
class Drain:
    """`digests` take no sequence that comes after `order`, until `beneficiary` has room."""

    beneficiary: str
    order: Order
    digests: frozenset[str]


def renew_drain(
    drain: Drain | None,
    arena: AdapterArena,
    digest: str,
    runs: tuple[int, ...],
    order: Order,
    running: Iterable[Sequence],
) -> Drain:
    """Adapters whose end makes room for `digest`, soonest done first. A choice is kept."""
    kept = drain.digests if drain is not None and drain.beneficiary == digest else frozenset()
    if kept and arena.would_fit(runs, kept):
        return Drain(digest, order, kept)
    remaining: dict[str, int] = {}
    for sequence in running:
        if sequence.adapter is not None:
            longest = max(remaining.get(sequence.adapter, 0), sequence.remaining)
            remaining[sequence.adapter] = longest
    chosen: set[str] = set()
    for candidate in sorted(remaining, key=lambda d: (remaining[d], d)):
        if arena.would_fit(runs, chosen):
            break
        chosen.add(candidate)
    return Drain(digest, order, frozenset(chosen))
