"""Engines that do not start, or stand still: said to be the reason at first, and replaced later."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import psutil
import pytest

from loraplex.server.config import EngineConfig
from loraplex.server.engine.messages import (
    AdapterPlaced,
    AdapterSettled,
    Alive,
    EngineReady,
    EngineStats,
    FromEngine,
    NeedSlab,
    SlabReleased,
    StartProgress,
    StepOutput,
)
from loraplex.server.worker import tether
from loraplex.server.worker.process import engine_supervisor, recovery
from loraplex.server.worker.process.engine_process import EngineDied, EngineProcess, spawn_engine
from loraplex.server.worker.process.engine_supervisor import (
    EngineListener,
    EngineStartError,
    EngineSupervisor,
)
from loraplex.server.worker.process.recovery import Backoff
from tests.certifying.factory import certify

NO_PROCESS = BlockingIOError(11, "Resource temporarily unavailable")


class Silent:
    """An engine process that says nothing."""

    pid = 1

    def __init__(self) -> None:
        self.closed = False

    async def receive(self) -> FromEngine:
        return await asyncio.Event().wait() and EngineReady(0, 0, 0, 0, 0, 0, "", "")

    async def close(self, grace_s: float) -> None:
        self.closed = True


class ShortLived(Silent):
    """It dies as soon as it is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    async def receive(self) -> FromEngine:
        if self.ready:
            raise EngineDied("killed by SIGKILL (is memory short?)")
        self.ready = True
        return EngineReady(0, 0, 0, 0, 0, 0, "", "")


class Freezing(Silent):
    """It gives signs of life, and then no more."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = 3

    async def receive(self) -> FromEngine:
        if not self.signs:
            return await super().receive()
        self.signs -= 1
        return Alive()


class HungStep(Silent):
    """It steps for a while; then a step hangs, and its loop goes on to see to adapters."""

    def __init__(self, steps_for_s: float) -> None:
        super().__init__()
        self._hangs_at = time.monotonic() + steps_for_s
        beside: list[FromEngine] = [SlabReleased("a"), NeedSlab("b")]
        beside += [AdapterPlaced("c", ()), AdapterSettled(1)]
        self._beside = itertools.cycle(beside)
        self._began = False
        self.hung = False
        self.killed = asyncio.Event()

    async def receive(self) -> FromEngine:
        await asyncio.sleep(0)
        if self.killed.is_set():
            raise EngineDied("killed by SIGKILL")
        if not self._began:
            self._began = True
            return EngineReady(0, 0, 0, 0, 0, 0, "", "")
        self.hung = time.monotonic() > self._hangs_at
        return next(self._beside) if self.hung else StepOutput(1, (), EngineStats(), 0.0, 0)

    def kill(self) -> None:
        self.killed.set()


class Working:
    """A listener with sequences in the engine."""

    def __init__(self) -> None:
        self.frames = set[type[FromEngine]]()

    def engine_starting(self, progress: StartProgress) -> None: ...

    def engine_ready(self, ready: EngineReady) -> None: ...

    def engine_frame(self, frame: FromEngine) -> None:
        self.frames.add(type(frame))

    def engine_lost(self, reason: str, from_outside: bool = False) -> None: ...

    def engine_suspected(self, suspected: bool) -> None: ...

    def engine_has_work(self) -> bool:
        return True


def supervising(
    start: Callable[[], Silent],
    start_timeout_s: float = 30.0,
    start_silence_s: float = 30.0,
    step_timeout_s: float = 60.0,
) -> EngineSupervisor:
    async def begin() -> EngineProcess:
        return cast(EngineProcess, start())

    return EngineSupervisor(begin, step_timeout_s, start_timeout_s, start_silence_s)


async def test_an_engine_that_is_never_ready_is_ended() -> None:
    engine = Silent()
    supervisor = supervising(lambda: engine, start_timeout_s=0.01)
    with pytest.raises(EngineStartError, match=r"not ready within 0\.01 s"):
        await asyncio.wait_for(supervisor.run(Mock(spec=EngineListener)), 240)
    assert engine.closed


class Loading(Silent):
    """It says how far its start is, and gives signs of life between."""

    def __init__(self) -> None:
        super().__init__()
        ready = EngineReady(0, 0, 0, 0, 0, 0, "", "")
        self._frames: list[FromEngine] = [StartProgress("reading weights", 1, 2), Alive(), ready]

    async def receive(self) -> FromEngine:
        return self._frames.pop(0) if self._frames else await super().receive()


async def test_a_listener_hears_how_far_the_start_is() -> None:
    listener, ready = Mock(spec=EngineListener), asyncio.Event()
    listener.engine_ready.side_effect = lambda frame: ready.set()
    running = asyncio.create_task(supervising(Loading).run(listener))
    await asyncio.wait_for(ready.wait(), 240)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    heard = [call.args[0] for call in listener.engine_starting.call_args_list]
    assert heard == [StartProgress("reading weights", 1, 2)] * 2, "also while it is silent"


async def test_an_engine_that_freezes_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_supervisor, "Backoff", lambda: Backoff(first_s=0.001))
    frozen = Freezing()
    starts = [ShortLived(), frozen]
    begun = asyncio.Event()  # the third

    def start() -> Silent:
        if starts:
            return starts.pop(0)
        begun.set()
        return Silent()

    listener = Mock(spec=EngineListener)
    supervisor = supervising(start, start_silence_s=0.01)
    running = asyncio.create_task(supervisor.run(listener))
    await asyncio.wait_for(begun.wait(), 240)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (frozen.signs, frozen.closed) == (0, True)
    reason = "it gave no sign of life for 0.01 s while it started"
    assert listener.engine_lost.call_args_list[1].args == (reason, False)
    assert reason in caplog.text


async def test_a_hung_step_is_seen_behind_adapters_that_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_supervisor, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(recovery, "LEAST_LIMIT_S", 0.0)
    engine, listener = HungStep(steps_for_s=0.5), Working()
    supervisor = supervising(lambda: engine, step_timeout_s=0.2)
    running = asyncio.create_task(supervisor.run(listener))
    await asyncio.wait_for(engine.killed.wait(), 240)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert engine.hung, "it was killed while it made steps"
    assert listener.frames == {StepOutput, SlabReleased, NeedSlab, AdapterPlaced, AdapterSettled}


async def test_a_machine_without_processes_for_a_while_costs_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Likeliest just after the kernel has killed an engine for its memory."""
    monkeypatch.setattr(engine_supervisor, "Backoff", lambda: Backoff(first_s=0.001))
    starts: list[Silent | OSError] = [ShortLived(), NO_PROCESS, NO_PROCESS, ShortLived(), Silent()]
    begun = asyncio.Event()  # the last

    def start() -> Silent:
        outcome = starts.pop(0)
        if not starts:
            begun.set()
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    listener = Mock(spec=EngineListener)
    supervisor = supervising(start)
    running = asyncio.create_task(supervisor.run(listener))
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait({running, waiting}, timeout=240, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert not starts
    reasons = [call.args[0] for call in listener.engine_lost.call_args_list]
    assert [("could not be started" in reason) for reason in reasons] == [False, True, True, False]


async def test_a_first_engine_that_cannot_be_started_says_why() -> None:
    def start() -> Silent:
        raise NO_PROCESS

    with pytest.raises(EngineStartError, match="Resource temporarily unavailable"):
        await supervising(start).run(Mock(spec=EngineListener))


async def test_a_start_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(pid: int) -> int:
        raise OSError(24, "Too many open files")

    processes = []
    spawn = tether.spawn

    def watched(*arguments: object, **options: object) -> object:
        processes.append(spawn(*arguments, **options))  # type: ignore[arg-type]
        return processes[-1]

    monkeypatch.setattr(tether, "spawn", watched)
    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="Too many open files"):
        await spawn_engine(certify(), cast(EngineConfig, {}), 0)
    assert processes[0].wait(240) == -9
    for _ in range(10):
        await asyncio.sleep(0)  # the transport is closed in a turn of the loop
    assert psutil.Process().num_fds() == before
