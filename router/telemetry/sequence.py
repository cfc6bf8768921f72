"""The spans of one sequence: queue, placement, load, prefill, decode; again for each attempt."""

from collections.abc import Callable

from router.telemetry.request import Notes, Trace
from server.protocol import TokenEvent


class SequenceTrace:
    """Told of what happens as it happens. Keeps times only; spans are made when a part is over."""

    def __init__(self, trace: Trace, adapter: str | None, clock: Callable[[], float]) -> None:
        self._trace = trace
        self._clock = clock
        self._adapter: Notes = {} if adapter is None else {"loraplex.adapter.digest": adapter}
        self._notes: Notes = {}
        self._submitted = self._first = 0.0

    def placed(self, began: float, worker: str, reason: str, tier: str, attempt: int) -> float:
        """It left the queue, which it entered at `began`. Returns the time."""
        now = self._clock()
        self._notes = {
            **self._adapter,
            "loraplex.worker.id": worker,
            "loraplex.placement.reason": reason,
            "loraplex.adapter.tier": tier,
            "loraplex.attempt": attempt,
        }
        self._trace.stage("queue", began, now, self._notes)
        return now

    def submitted(self, placed: float) -> None:
        """The worker has, or has been sent, all that it needs."""
        self._submitted, self._first = self._clock(), 0.0
        self._trace.stage("placement", placed, self._submitted, self._notes)

    def received(self, event: TokenEvent) -> None:
        now = self._clock()
        if not self._first and event.token_ids:
            self._first = now
            loaded = min(self._submitted + (event.load_s or 0.0), now)
            if event.load_s:
                self._trace.stage("load", self._submitted, loaded, self._notes)
            self._trace.stage("prefill", loaded, now, self._notes)
        if event.finish is not None and self._first:
            self._trace.stage("decode", self._first, now, self._notes)
