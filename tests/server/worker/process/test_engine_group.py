"""Processes that share a model die together, and the first death is the cause."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from loraplex.server.engine.messages import FromEngine
from loraplex.server.worker.process.engine_process import EngineDied, EngineGroup, EngineProcess


class Process:
    """Lives until it is killed, or until its peers find it dead."""

    def __init__(self) -> None:
        self._end: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()

    def die(self, how: str, from_outside: bool = False) -> None:
        if not self._end.done():
            self._end.set_result(EngineDied(how, from_outside))

    async def receive(self) -> FromEngine:
        raise await self._end

    def kill(self) -> None:
        self.die("killed by SIGKILL")

    async def close(self, grace_s: float) -> None:
        self.kill()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("from_outside", [False, True])
def test_the_first_death_is_the_cause(number: int, from_outside: bool, tmp_path: Path) -> None:
    async def end() -> EngineDied:
        processes = [Process() for _ in range(3)]
        group = EngineGroup(cast(list[EngineProcess], processes), tmp_path / "of" / "meeting")
        processes[number].die("the first", from_outside)
        with pytest.raises(EngineDied) as found:
            await group.receive()
        await group.close(0)
        return found.value

    ended = asyncio.run(end())
    assert str(ended) == (
        "the first" if not number else f"the process of device {number}: the first"
    )
    assert ended.from_outside == from_outside


def test_a_leader_that_was_killed_is_the_cause_though_others_left_first(tmp_path: Path) -> None:
    async def end() -> EngineDied:
        leader, other = Process(), Process()
        group = EngineGroup(cast(list[EngineProcess], [leader, other]), tmp_path / "of" / "meeting")
        other.die("it left with code 0")
        await leader._end  # all are killed
        leader._end = asyncio.get_running_loop().create_future()
        leader.die("killed by SIGKILL", from_outside=True)
        with pytest.raises(EngineDied) as found:
            await group.receive()
        await group.close(0)
        return found.value

    assert asyncio.run(end()).from_outside
