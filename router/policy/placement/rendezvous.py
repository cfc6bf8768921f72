"""The order of workers in which an adapter's home is looked for. Pure.

Rendezvous hashing (Thaler and Ravishankar, 1998): every router ranks alike without communication. A
worker that comes or goes moves only its own adapters.
"""

from collections.abc import Sequence
from hashlib import blake2b

from loraplex.adapters.common.newest import NewestKept

MAX_RANKINGS = 1 << 14


class Rankings:
    """Rankings of worker ids by key, remembered while the workers are the same."""

    def __init__(self) -> None:
        self._workers: tuple[str, ...] = ()
        self._rankings = NewestKept[str, dict[str, int]](MAX_RANKINGS)

    def of(self, key: str, worker_ids: Sequence[str]) -> dict[str, int]:
        """The rank of each worker; 0 = the first home."""
        workers = tuple(worker_ids)
        if workers != self._workers:
            self._workers = workers
            self._rankings.clear()
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._rankings[key] = rank(key, workers)
        return ranking


def rank(key: str, worker_ids: Sequence[str]) -> dict[str, int]:
    def score(worker_id: str) -> bytes:
        return blake2b(f"{worker_id}\0{key}".encode(), digest_size=8).digest()

    return {worker_id: i for i, worker_id in enumerate(sorted(worker_ids, key=score))}
