"""Keeps an engine alive: starts it, hands its frames on, restarts it when it dies or stalls."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from loraplex.server.engine.messages import (
    Alive,
    EngineFailed,
    EngineReady,
    FromEngine,
    StartProgress,
    StepOutput,
    ToEngine,
)
from loraplex.server.worker.process.engine_process import EngineDied
from loraplex.server.worker.process.recovery import Backoff, StallWatch

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
SHUTDOWN_GRACE_S = 5.0
# Loading a large model from a slow disk, and warming up; what takes longer hangs.
START_TIMEOUT_S = 1800.0
# It sends four frames a second from its start, but reading a tensor from a slow disk may block its
# interpreter for minutes.
START_SILENCE_S = 300.0


class EngineLife(Protocol):
    """One life of an engine: a process, or several that share a model."""

    def send(self, frame: ToEngine) -> None: ...

    async def receive(self) -> FromEngine: ...

    def kill(self) -> None: ...

    async def close(self, grace_s: float) -> None: ...


class EngineStartError(Exception):
    """The engine cannot start at all; str() says why and what to do."""


class EngineListener(Protocol):
    """Hears of the engine's state. Called on the event loop; must not block."""

    def engine_starting(self, progress: StartProgress) -> None:
        """Note the progress of a start. Called several times a second until the engine is ready."""
        ...

    def engine_ready(self, ready: EngineReady) -> None: ...

    def engine_frame(self, frame: FromEngine) -> None: ...

    def engine_lost(self, reason: str, from_outside: bool = False) -> None:
        """Note that the engine is lost, and all that it had is gone. from_outside: as of
        EngineDied.
        """
        ...

    def engine_suspected(self, suspected: bool) -> None:
        """Note that the engine seems to stand still, or no longer does. Called at each change."""
        ...

    def engine_has_work(self) -> bool:
        """Say whether the engine owes a StepOutput: there are sequences. With all of them waiting
        for adapters it still sends one now and then, so one that hangs cannot hide behind what
        it waits for.
        """
        ...


class EngineSupervisor:
    """Runs engines one after the other until `close`."""

    def __init__(
        self,
        start: Callable[[], Awaitable[EngineLife]],
        step_timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        start_silence_s: float = START_SILENCE_S,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._start_silence_s = start_silence_s
        self._start = start
        self._step_timeout_s = step_timeout_s
        self._backoff = Backoff()
        self._engine: EngineLife | None = None
        self._closing = False
        self.ready = False
        self.restarts = 0

    def send(self, frame: ToEngine) -> None:
        """Send to the present engine; without one the frame is lost, as engine_lost tells."""
        if self._engine is not None:
            self._engine.send(frame)

    async def run(self, listener: EngineListener) -> None:
        """Run engines, one after another, until `close`. Raises EngineStartError when the very
        first engine does not get ready.
        """
        was_ready = False
        while not self._closing:
            ready_at = None
            try:
                self._engine = await self._begin()
                ready = await self._await_ready(self._engine, listener)
                ready_at = time.monotonic()
                was_ready = self.ready = True
                listener.engine_ready(ready)
                await self._pump(self._engine, listener)
            except (EngineDied, EngineStartError) as error:
                if not was_ready:
                    await self._discard()
                    raise EngineStartError(str(error)) from error
                await self._lost(error, ready_at, listener)

    async def _begin(self) -> EngineLife:
        """Start an engine. Raises EngineDied too when the machine has no process or descriptor
        left: it soon may.
        """
        try:
            return await self._start()
        except OSError as error:
            raise EngineDied(f"it could not be started: {error}") from error

    async def _await_ready(self, engine: EngineLife, listener: EngineListener) -> EngineReady:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                progress = StartProgress("starting")
                frame = await self._heard(engine)
                while isinstance(frame, Alive | StartProgress):
                    progress = progress if isinstance(frame, Alive) else frame
                    listener.engine_starting(progress)
                    frame = await self._heard(engine)
        except TimeoutError as error:
            limit = self._start_timeout_s
            raise EngineDied(f"it was not ready within {limit:g} s of its start") from error
        if isinstance(frame, EngineFailed):
            raise EngineStartError(frame.message)
        if not isinstance(frame, EngineReady):
            raise EngineDied(f"it spoke before it was ready ({type(frame).__name__})")
        return frame

    async def _heard(self, engine: EngineLife) -> FromEngine:
        """The starting engine's next frame. Raises EngineDied too when it falls silent."""
        limit = self._start_silence_s
        receiving = asyncio.create_task(engine.receive())
        try:
            # In turns: if this process itself stands still for long, that is one of them.
            for _ in range(math.ceil(limit / WATCH_INTERVAL_S)):
                await asyncio.wait({receiving}, timeout=min(limit, WATCH_INTERVAL_S))
                if receiving.done():
                    return receiving.result()
        finally:
            receiving.cancel()
        raise EngineDied(f"it gave no sign of life for {limit:g} s while it started")

    async def _pump(self, engine: EngineLife, listener: EngineListener) -> None:
        watch = StallWatch(self._step_timeout_s, time.monotonic())
        watcher = asyncio.create_task(self._kill_when_stalled(engine, watch, listener))
        try:
            while True:
                frame = await engine.receive()
                if isinstance(frame, StepOutput):
                    watch.progressed(time.monotonic(), frame.step_s)
                else:  # adapters come and go while a step hangs
                    watch.heard(time.monotonic())
                if not isinstance(frame, Alive):
                    listener.engine_frame(frame)
        finally:
            watcher.cancel()

    async def _kill_when_stalled(
        self, engine: EngineLife, watch: StallWatch, listener: EngineListener
    ) -> None:
        suspected, due = False, time.monotonic()
        while True:
            due += WATCH_INTERVAL_S
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            if now - due > WATCH_INTERVAL_S:
                watch.restart(now)
                due = now
            verdict = watch.verdict(now, listener.engine_has_work())
            if verdict == "stalled":
                break
            if suspected != (verdict == "suspect"):
                suspected = not suspected
                log.warning("the engine %s", "is silent" if suspected else "is heard again")
                listener.engine_suspected(suspected)
        log.error("the engine gives no sign of life, or makes no step with work to do: killed")
        engine.kill()

    async def _lost(
        self, error: Exception, ready_at: float | None, listener: EngineListener
    ) -> None:
        self.ready = False
        await self._discard()
        if self._closing:
            return
        listener.engine_lost(str(error), isinstance(error, EngineDied) and error.from_outside)
        healthy_s = 0.0 if ready_at is None else time.monotonic() - ready_at
        delay_s = self._backoff.delay_s(healthy_s)
        self.restarts += 1
        log.error("the engine is gone: %s; it is started again in %g s", error, delay_s)
        await asyncio.sleep(delay_s)

    async def _discard(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close(grace_s=0)

    async def close(self) -> None:
        """Let the engine leave; it is gone on return."""
        self._closing = True
        self.ready = False
        if self._engine is not None:
            await self._engine.close(SHUTDOWN_GRACE_S)
