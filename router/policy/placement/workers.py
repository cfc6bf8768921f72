"""A router's view of one worker, kept up to date by its connection. Pure.

Own counts come first: what a worker reports is half a second old by nature.
"""

import math
from collections.abc import Container

import msgspec

# Sequences sent and not yet begun, at most: the rest waits where turns are kept. With KV to spare
# enough to fill the next steps; without, they would only queue up in front of the worker.
_STARTING_SHARE = 4
_LEAST_STARTING, _LEAST_STARTING_FULL = 32, 4
_KV_SPARE = 0.05
# Beyond the rows, so many of them: enough that a row that becomes free finds its next sequence.
_AHEAD_SHARE = 64
# So many of those are the next steps' prompts; more are a queue.
_STARTING_FREE, _STARTING_FREE_SHARE = 2, 16
# Copies to the device before any was measured: a slow disk's rate.
_FIRST_LOAD_BYTES_S = 1e9
# A load that was caused and is never reported (it failed, or the status was lost).
_COMING_S = 10.0


class WorkerView(msgspec.Struct, eq=False):
    """One worker. Own: of this router.

    credits: sequences that this router may have there. in_flight: own, sent or about to be.
    starting: own, sent without a token yet although their adapter was there. begun: own, with a
    token. rows: own sequences that can be computed at once, 0 = not known. own: in_flight by
    adapter. coming: adapters that own sequences make it load, and when the first was sent.
    load: sequences there, whoever sent them. free_kv: share of KV pages. resident, loading:
    digests on its device, or on their way. admitted: what it is known to have on its disk.
    load_bytes_s: measured, of an adapter's way to the device.
    """

    worker_id: str
    ready: bool = False
    draining: bool = False
    credits: int = 1
    in_flight: int = 0
    starting: int = 0
    begun: int = 0
    rows: int = 0
    own: dict[str, int] = {}
    coming: dict[str, float] = {}
    load: int = 0
    free_kv: float = 1.0
    resident: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    admitted: Container[str] = ()
    load_bytes_s: float = _FIRST_LOAD_BYTES_S

    @property
    def able(self) -> bool:
        return self.ready and not self.draining

    @property
    def size(self) -> int:
        """Own sequences that it can compute at once, as far as it is known."""
        return self.rows or self.credits

    @property
    def has_room(self) -> bool:
        if not self.ready or self.draining or self.in_flight >= self.credits:
            return False
        if self.rows and self.begun + self.starting >= self.rows + self.rows // _AHEAD_SHARE + 1:
            return False
        return self.starting < self._most_starting

    @property
    def has_spare(self) -> bool:
        """Whether there is room beyond what is kept for tenants that use less than their share.

        The root of the rows, rounded up: what random arrivals vary by (square-root staffing).
        """
        size = self.size
        taken = self.begun + self.starting if self.rows else self.in_flight
        return taken < size - math.ceil(math.sqrt(size))

    @property
    def is_free(self) -> bool:
        """Whether what is sent now begins at once, as far as can be seen from here."""
        return self.starting <= max(_STARTING_FREE, self.credits // _STARTING_FREE_SHARE)

    @property
    def _most_starting(self) -> int:
        if self.free_kv < _KV_SPARE:
            return _LEAST_STARTING_FULL
        return max(_LEAST_STARTING, self.credits // _STARTING_SHARE)

    @property
    def use(self) -> float:
        """How far it is from having no room, 0 to 1; more when credits were taken back."""
        return max(self.in_flight / max(1, self.credits), 1.0 - self.free_kv)

    def holds(self, digest: str) -> bool:
        """Whether the adapter is on its device, or on its way there."""
        return digest in self.resident or digest in self.loading or digest in self.coming

    def knows(self, digest: str) -> bool:
        """Whether it need not fetch the adapter."""
        return digest in self.resident or digest in self.admitted

    def enter(self, adapter: str, now: float) -> None:
        """Notes that an own sequence is on its way. adapter: "" = base."""
        self.in_flight += 1
        self.own[adapter] = self.own.get(adapter, 0) + 1
        if adapter and not self.holds(adapter):
            self.coming[adapter] = now

    def leave(self, adapter: str) -> None:
        """Notes that a sequence of this adapter is over."""
        self.in_flight -= 1
        left = self.own.pop(adapter) - 1
        if left:
            self.own[adapter] = left
        else:
            self.coming.pop(adapter, None)

    def begin(self, was_starting: bool) -> None:
        """Notes that the first event of an own sequence came."""
        self.starting -= was_starting
        self.begun += 1

    def arrived(self, now: float) -> None:
        """Takes account of a report of residency: what it states need not be guessed any more."""
        for digest, since in list(self.coming.items()):
            if digest in self.resident or digest in self.loading or now - since > _COMING_S:
                del self.coming[digest]
