"""Adapters in use that take no new sequences, so that another adapter gets room. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.scheduling.sequence import Precedence, Sequence


@dataclass(frozen=True, slots=True)
class Drain:
    """`digests` take no sequence that comes after `precedence`, until `beneficiary` has room."""

    beneficiary: str
    precedence: Precedence
    digests: frozenset[str]


def renew_drain(
    drain: Drain | None,
    arena: AdapterArena,
    digest: str,
    runs: tuple[int, ...],
    precedence: Precedence,
    running: Iterable[Sequence],
) -> Drain:
    """Choose adapters whose eviction makes room for `digest`, soonest done first.

    drain: the choice so far; it is kept while it still makes enough room.
    """
    kept = drain.digests if drain is not None and drain.beneficiary == digest else frozenset()
    if kept and arena.would_fit(runs, kept):
        return Drain(digest, precedence, kept)
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
    return Drain(digest, precedence, frozenset(chosen))
