"""Faults of a fleet, done to real processes. A fault ends when all is whole again."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos.processes import Fleet, Process, engine_of, until
from tests.network import Direction

LONGEST_FREEZE_S = 6.0
LONGEST_OUTAGE_S = 4.0
LONGEST_PARTITION_S = 8.0
SLOW_S = 0.2
LINK_DELAY_S = 0.1
LINK_BYTES_PER_S = 64_000
# A slow engine stands still for a part of each period.
PERIOD_S, STILL_S = 0.2, 0.15


@dataclass(frozen=True)
class Done:
    """A fault that was done. at, healed: on the monotonic clock.

    orphans_s: after a router's death, how long until the workers had freed what they ran for it.
    """

    fault: str
    at: float
    healed: float
    orphans_s: float | None = None


class Faults:
    """One fault at a time, at targets that the dice choose. longest_s: of what heals by itself."""

    def __init__(self, fleet: Fleet, dice: random.Random, longest_s: float) -> None:
        self._fleet = fleet
        self._dice = dice
        self._longest_s = longest_s
        self._orphans_s: float | None = None
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": self._kill_worker,
            "engine killed": self._kill_engine,
            "worker frozen": self._freeze_worker,
            "engine frozen": self._freeze_engine,
            "engine slow": self._slow_engine,
            "router and worker parted": self._part,
            "parted one way": self._part_one_way,
            "network slow": self._slow_network,
            "router killed": self._kill_router,
            "rolling restart": self._roll,
            "redis killed": self._kill_redis,
            "redis emptied": self._empty_redis,
            "redis frozen": self._freeze_redis,
            "redis slow": self._slow_redis,
        }

    async def do(self, fault: str) -> Done:
        at = time.monotonic()
        self._orphans_s = None
        await self.kinds[fault]()
        await self._fleet.until_whole()
        return Done(fault, at, time.monotonic(), self._orphans_s)

    async def _kill_worker(self) -> None:
        await self._kill(self._dice.choice(self._fleet.workers))

    async def _kill_router(self) -> None:
        """Clients of the router lose their connections; they ask again, elsewhere."""
        router = self._dice.choice(self._fleet.routers)
        at = await self._end(router)
        await self._fleet.until_orphans_are_gone()
        self._orphans_s = time.monotonic() - at
        self._fleet.start(router)
        await self._fleet.until_up(router)

    async def _kill(self, process: Process) -> None:
        await self._end(process)
        self._fleet.start(process)
        await self._fleet.until_up(process)

    async def _end(self, process: Process) -> float:
        """When it was killed, on the monotonic clock."""
        process.dying = True
        at = time.monotonic()
        process.signal(signal.SIGKILL)
        await process.exited()
        return at

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
        await asyncio.sleep(self._lasting_s(0.5, LONGEST_FREEZE_S))
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    async def _slow_engine(self) -> None:
        """It gets on, at a quarter of its speed, and stands still again and again."""
        worker = self._dice.choice(self._fleet.workers)
        engine = await self._engine(worker)
        try:
            for _ in range(round(self._lasting_s(1.0, LONGEST_FREEZE_S) / PERIOD_S)):
                os.kill(engine, signal.SIGSTOP)
                await asyncio.sleep(STILL_S)
                os.kill(engine, signal.SIGCONT)
                await asyncio.sleep(PERIOD_S - STILL_S)
        except ProcessLookupError:
            await self._until_replaced(worker, engine)

    async def _part(self) -> None:
        await self._stall(*self._dice.choice(self._fleet.links).directions)

    async def _part_one_way(self) -> None:
        await self._stall(self._dice.choice(self._dice.choice(self._fleet.links).directions))

    async def _stall(self, *directions: Direction) -> None:
        """Afterwards all arrives late, or the connections turn out to be forgotten on the way."""
        for direction in directions:
            direction.stall()
        await asyncio.sleep(self._lasting_s(0.5, LONGEST_PARTITION_S))
        if self._dice.random() < 0.5:
            for link in self._fleet.links:
                if directions[0] in link.directions:
                    await link.reset()
        for direction in directions:
            direction.flow()

    async def _slow_network(self) -> None:
        """Between all routers and all workers."""
        directions = [one for link in self._fleet.links for one in link.directions]
        for direction in directions:
            direction.delay_s, direction.bytes_per_s = LINK_DELAY_S, LINK_BYTES_PER_S
        await asyncio.sleep(self._lasting_s(1.0, LONGEST_PARTITION_S))
        for link in self._fleet.links:
            link.heal()

    async def _roll(self) -> None:
        """Every process in turn, gently, as a new release is brought out."""
        for process in self._fleet.processes:
            process.signal(signal.SIGTERM)
            code = await process.exited()
            assert code == 0, f"{process.name} left with {code}: {process.log[-2000:]}"
            self._fleet.start(process)
            await self._fleet.until_up(process)
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
        return self._lasting_s(0.2, LONGEST_OUTAGE_S)

    def _lasting_s(self, least: float, longest: float) -> float:
        return self._dice.uniform(least, min(longest, self._longest_s))

    async def _engine(self, worker: Process) -> int:
        await until(lambda: engine_of(worker) is not None)
        pid = engine_of(worker)
        assert pid is not None
        return pid

    async def _until_replaced(self, worker: Process, engine: int) -> None:
        await until(lambda: engine_of(worker) not in (None, engine))
