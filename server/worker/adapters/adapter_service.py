"""Turns AdapterLoad and AdapterMerge frames into admitted adapters, on threads.

Loads are fetched and checked here; merges are computed in processes of their own (`merging`).
"""

import asyncio
import hashlib
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple, Protocol

from loraplex.adapters.common.recent import Recent
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.recipe import MergeRecipe
from loraplex.adapters.ref import AdapterRef, RefSource, shown_name
from loraplex.server.protocol import AdapterLoad, AdapterMerge, AdapterState, LoadStage
from loraplex.server.worker.adapters.merging import Merger
from loraplex.server.worker.metrics import WorkerMetrics
from loraplex.server.worker.validation import check_load, check_merge

log = logging.getLogger(__name__)

MAX_PENDING_LOADS = 4096
MAX_MERGES = 64
_MAX_LOGGED = 65_536
RETRY_AFTER_S = 2.0

Report = Callable[[AdapterState], None]
Progress = Callable[[LoadStage], None]


class _Flight(NamedTuple):
    """Loads that cannot differ in their result. credential: a hash, as keys outlive their use."""

    what: tuple[AdapterRef, str | None] | tuple[MergeRecipe, tuple[AdapterRef, ...]]
    credential: str


class _StageTimes:
    """How long a load is in each of its stages; one that fails does not end its last."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._stage: LoadStage = "ready"
        self._since = 0.0

    def enter(self, stage: LoadStage, now: float) -> None:
        if self._stage == "fetching":
            self._metrics.load_took("fetch", now - self._since)
        elif self._stage == "checking":
            self._metrics.load_took("check", now - self._since)
        self._stage, self._since = stage, now


class AdapterStorage(Protocol):
    """The part of an AdapterStore that is needed here; see there."""

    def recall(self, ref: AdapterRef) -> AdapterManifest | None: ...

    def admit(
        self,
        ref: AdapterRef,
        token: str | None,
        expected_digest: str | None,
        progress: Callable[[LoadStage], None],
    ) -> AdapterManifest: ...


class AdapterService:
    """Load and merge adapters for routers. `fetching`: threads that may wait for a source; each
    source has its own, so a source that stalls holds up no other. `reading`: threads that only
    read the disk, so stored adapters do not wait behind downloads.

    Loads of one adapter with one credential share a thread; the store shares the fetch.

    Authorisation stays the caller's own: another token is another flight.
    """

    def __init__(
        self,
        store: AdapterStorage,
        fetching: Mapping[RefSource, Executor],
        reading: Executor,
        merger: Merger,
        metrics: WorkerMetrics,
    ) -> None:
        self._store = store
        self._fetching = fetching
        self._reading = reading
        self._merger = merger
        self._metrics = metrics
        self._flights: dict[_Flight, list[tuple[str, Report]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending = 0
        self._merges = 0
        self._logged: Recent[str, bool] = Recent(_MAX_LOGGED)

    def load(self, frame: AdapterLoad, report: Report) -> None:
        """Answer with AdapterStates; the last is `ready` or `failed`, and there is always one."""

        flight = _Flight((frame.ref, frame.expected_digest), _fingerprint(frame.token))
        work = partial(self._admitted, frame)
        if self._accepts(frame.load_id, check_load(frame), report):
            self._board(flight, frame.load_id, report, lambda: self._fly(flight, work))

    def merge(self, frame: AdapterMerge, report: Report) -> None:
        """Merge adapters, and report the result as `load` does."""
        error = check_merge(frame)
        refs = tuple(source.ref for source in frame.sources)
        credential = _fingerprint(*(source.token for source in frame.sources))
        flight = _Flight((frame.recipe, refs), credential)
        if error is None and flight not in self._flights and self._merges >= MAX_MERGES:
            message = "too many adapters are being merged"
            error = AdapterError("unavailable", message, (), RETRY_AFTER_S)
        if self._accepts(frame.load_id, error, report):
            self._board(flight, frame.load_id, report, lambda: self._fly_merge(flight, frame))

    def _accepts(self, load_id: str, error: AdapterError | None, report: Report) -> bool:
        if self._pending >= MAX_PENDING_LOADS:
            message = "too many adapters are being loaded"
            error = AdapterError("unavailable", message, (), RETRY_AFTER_S)
        if error is not None:
            self._metrics.loads.labels(error.code).inc()
            report(failed(load_id, error))
        return error is None

    def _board(
        self,
        flight: _Flight,
        load_id: str,
        report: Report,
        fly: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        self._pending += 1
        waiting = self._flights.get(flight)
        if waiting is not None:
            waiting.append((load_id, report))
            return
        self._flights[flight] = [(load_id, report)]
        task = asyncio.create_task(fly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fly_merge(self, flight: _Flight, frame: AdapterMerge) -> None:
        self._merges += 1
        try:
            await self._fly(flight, partial(self._merged, frame))
        finally:
            self._merges -= 1

    async def _fly(
        self, flight: _Flight, work: Callable[[Progress], Awaitable[AdapterManifest]]
    ) -> None:
        loop = asyncio.get_running_loop()
        stages = _StageTimes(self._metrics)

        def progress(stage: LoadStage) -> None:
            loop.call_soon_threadsafe(self._progress, flight, stage)
            loop.call_soon_threadsafe(stages.enter, stage, time.monotonic())

        try:
            manifest = await work(progress)
        except AdapterError as error:
            self._failed(flight, error)
        except Exception as error:
            # The end of a thread: callers get an answer even to a programming error. An exception's
            # text may quote a header, and with it a credential: only its kind and place are logged.
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("an adapter could not be loaded: %s\n%s", type(error).__name__, place)
            self._failed(flight, AdapterError("unavailable", "the adapter could not be loaded"))
        else:
            stages.enter("ready", time.monotonic())
            self._ready(flight, manifest)

    async def _admitted(self, frame: AdapterLoad, progress: Progress) -> AdapterManifest:
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(self._reading, self._store.recall, frame.ref)
        if known is not None and frame.expected_digest in (None, known.digest):
            return known
        return await loop.run_in_executor(
            self._fetching[frame.ref.source],
            lambda: self._store.admit(frame.ref, frame.token, frame.expected_digest, progress),
        )

    async def _merged(self, frame: AdapterMerge, progress: Progress) -> AdapterManifest:
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(self._reading, self._merger.known, frame.recipe)
        if known is not None:
            return known
        threads = self._merger.threads(frame.recipe)
        return await loop.run_in_executor(threads, self._merger.merge, frame, progress)

    def _progress(self, flight: _Flight, stage: LoadStage) -> None:
        subject = flight.what[0]
        if stage == "fetching" and isinstance(subject, AdapterRef):
            self._metrics.fetches.labels(subject.source).inc()
        for load_id, report in self._flights.get(flight, ()):
            report(AdapterState(load_id, stage))

    def _ready(self, flight: _Flight, manifest: AdapterManifest) -> None:
        self._log_partial(flight, manifest)
        for load_id, report in self._land(flight):
            self._metrics.loads.labels("ready").inc()
            report(AdapterState(load_id, "ready", manifest))

    def _log_partial(self, flight: _Flight, manifest: AdapterManifest) -> None:
        """Log that an adapter is applied in part, once for each content."""
        if manifest.partial is None or self._logged.get(manifest.digest) is not None:
            return
        self._logged.put(manifest.digest, True)
        subject = flight.what[0]
        name = shown_name(subject) if isinstance(subject, AdapterRef) else "a merge"
        log.warning("adapter %.12s (%s) is %s", manifest.digest, name, manifest.partial.text)

    def _failed(self, flight: _Flight, error: AdapterError) -> None:
        for load_id, report in self._land(flight):
            self._metrics.loads.labels(error.code).inc()
            report(failed(load_id, error))

    def _land(self, flight: _Flight) -> list[tuple[str, Report]]:
        waiting = self._flights.pop(flight)
        self._pending -= len(waiting)
        return waiting


def _fingerprint(*tokens: str | None) -> str:
    return hashlib.sha256("\0".join(token or "" for token in tokens).encode()).hexdigest()


def failed(load_id: str, error: AdapterError) -> AdapterState:
    return AdapterState(
        load_id,
        "failed",
        error=error.code,
        message=error.message,
        violations=error.violations,
        retry_after_s=error.retry_after_s,
        trained_for=error.trained_for,
    )
