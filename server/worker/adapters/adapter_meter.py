"""Measures adapters on their way to the device and off it, from the engine's frames."""

import time
from collections.abc import Collection

from loraplex.server.worker.adapters.thrash import ThrashWatch
from loraplex.server.worker.metrics import WorkerMetrics

THRASH_WINDOW_S = 300.0


class AdapterMeter:
    """Observes every step of a load that the worker sees."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._thrash = ThrashWatch(THRASH_WINDOW_S)
        self._copying_since: dict[str, float] = {}

    def evicted(self, before: Collection[str], after: Collection[str]) -> None:
        """Note the adapters that were on the device, and those that are now."""
        self._thrash.changed(before, after, time.monotonic())

    def staged(self, digest: str) -> None:
        """Note that the adapter is in host memory, and reported to the engine."""
        self._copying_since[digest] = time.monotonic()

    def released(self, digest: str, nbytes: int, copy_s: float | None) -> None:
        """The engine needs the host's bytes no longer. nbytes: that came to the device. copy_s:
        seconds that they were on their way; 0 = unknown, None = the engine did not use them."""
        now = time.monotonic()
        since = self._copying_since.pop(digest, None)
        if copy_s is None:
            return
        if self._thrash.loads(digest, now):
            self._metrics.reloads.inc()
        if since is not None:
            self._metrics.load_took("copy", now - since)
            self._metrics.copied_bytes.inc(nbytes)
        if copy_s:
            self._metrics.load_took("transfer", copy_s)

    def engine_lost(self) -> None:
        self._copying_since.clear()
