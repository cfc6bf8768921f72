"""What can go wrong with a fleet, done to real processes. A fault ends when all is whole again."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos.processes import Fleet, Process, engine_of, until

LONGEST_FREEZE_S = 6.0
LONGEST_OUTAGE_S = 4.0
SLOW_S = 0.2


@dataclass(frozen=True)
class Done:
    """A fault that was done. at, healed: on the monotonic clock."""

    fault: str
    at: float
    healed: float


class Faults:
    """One fault at a time, at targets that the dice choose."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self._fleet = fleet
        self._dice = dice
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": self._kill_worker,
            "engine killed": self._kill_engine,
            "worker frozen": self._freeze_worker,
            "engine frozen": self._freeze_engine,
            "router killed": self._kill_router,
            "rolling restart": self._roll,
            "redis killed": self._kill_redis,
            "redis emptied": self._empty_redis,
            "redis frozen": self._freeze_redis,
            "redis slow": self._slow_redis,
        }

    async def do(self, fault: str) -> Done:
        at = time.monotonic()
        await self.kinds[fault]()
        await self._fleet.until_whole()
        return Done(fault, at, time.monotonic())

    async def _kill_worker(self) -> None:
        await self._kill(self._dice.choice(self._fleet.workers))

    async def _kill_router(self) -> None:
        """What its clients held is broken; they ask again, elsewhere."""
        await self._kill(self._dice.choice(self._fleet.routers))

    async def _kill(self, process: Process) -> None:
        process.dying = True
        process.signal(signal.SIGKILL)
        await process.exited()
        self._fleet.start(process)

    async def _kill_engine(self) -> None:
        worker = self._dice.choice(self._fleet.workers)
        engine = await self._engine(worker)
        os.kill(engine, signal.SIGKILL)
        await self._until_replaced(worker, engine)

    async def _freeze_worker(self) -> None:
        worker = self._dice.choice(self._fleet.workers)
        await self._freeze(worker.pid)

    async def _freeze_engine(self) -> None:
        """It may be killed and replaced meanwhile: then there is nothing to wake."""
        worker = self._dice.choice(self._fleet.workers)
        await self._freeze(await self._engine(worker))

    async def _freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._dice.uniform(0.5, LONGEST_FREEZE_S))
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    async def _roll(self) -> None:
        """Every process in turn, gently, as a new release is brought out."""
        for process in self._fleet.processes:
            process.signal(signal.SIGTERM)
            code = await process.exited()
            assert code == 0, f"{process.name} left with {code}: {process.log[-2000:]}"
            self._fleet.start(process)
            await self._fleet.until_whole()

    async def _kill_redis(self) -> None:
        """It comes back empty."""
        redis = self._fleet.redis
        await redis.kill()
        await asyncio.sleep(self._outage_s())
        await redis.start()

    async def _empty_redis(self) -> None:
        await self._fleet.redis.command("FLUSHALL")
        await asyncio.sleep(self._outage_s())

    async def _freeze_redis(self) -> None:
        self._fleet.redis.freeze()
        await asyncio.sleep(self._outage_s())
        self._fleet.redis.thaw()

    async def _slow_redis(self) -> None:
        """Every command waits, for longer than a router is ready to."""
        for _ in range(round(self._outage_s() / SLOW_S)):
            await self._fleet.redis.command("CLIENT", "PAUSE", round(SLOW_S * 1000))

    def _outage_s(self) -> float:
        return self._dice.uniform(0.2, LONGEST_OUTAGE_S)

    async def _engine(self, worker: Process) -> int:
        await until(lambda: engine_of(worker) is not None)
        pid = engine_of(worker)
        assert pid is not None
        return pid

    async def _until_replaced(self, worker: Process, engine: int) -> None:
        await until(lambda: engine_of(worker) not in (None, engine))
