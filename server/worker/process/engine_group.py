"""The processes of one engine whose model several devices share: they live and die together."""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loraplex.server.config import EngineConfig
from loraplex.server.engine.messages import Alive, EngineFailed, FromEngine, ToEngine
from loraplex.server.worker.process.engine_process import (
    EngineDied,
    EngineProcess,
    GroupPlace,
    spawn_engine,
)


class EngineGroup:
    """Processes of one engine, one for each device. Has the methods of an EngineProcess. The first
    process plans and speaks with the worker; of the others the worker hears that they live, or
    why they cannot start.
    """

    def __init__(self, processes: Sequence[EngineProcess], meeting: Path) -> None:
        self._leader, *self._others = processes
        self._meeting = meeting
        self._ended: EngineDied | None = None
        self._failed: EngineFailed | None = None
        self._watching = [
            asyncio.create_task(self._watch(number, process))
            for number, process in enumerate(self._others, 1)
        ]

    def send(self, frame: ToEngine) -> None:
        self._leader.send(frame)

    async def receive(self) -> FromEngine:
        """The leader's next frame. Raises EngineDied once any process is gone."""
        try:
            return await self._leader.receive()
        except EngineDied as error:
            if self._failed is not None:
                failed, self._failed = self._failed, None
                return failed
            if self._ended is not None and not error.from_outside:
                raise self._ended from None
            raise

    def kill(self) -> None:
        for process in (self._leader, *self._others):
            process.kill()

    async def close(self, grace_s: float) -> None:
        """Close all processes. The others leave when the first one has left."""
        await self._leader.close(grace_s)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*(process.close(0) for process in self._others))
        await asyncio.gather(*self._watching, return_exceptions=True)
        shutil.rmtree(self._meeting.parent, ignore_errors=True)

    async def _watch(self, number: int, process: EngineProcess) -> None:
        """Read a process's frames until it is gone, which ends all processes."""
        try:
            while True:
                frame = await process.receive()
                if isinstance(frame, EngineFailed):
                    self._failed = frame
                elif not isinstance(frame, Alive):
                    raise EngineDied(f"it sent {type(frame).__name__}")
        except EngineDied as error:
            how = f"the process of device {number}: {error}"
            self._ended = self._ended or EngineDied(how, error.from_outside)  # the rest follows
        self.kill()


async def start_group(executor: str, config: EngineConfig, arena_fd: int) -> EngineGroup:
    """Start an engine process for each of `config.shards` devices, as `spawn_engine`."""
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="loraplex-group-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        meeting = folder / "meeting"
        pairs = [socket.socketpair() for _ in range(config.shards - 1)]
        for ends in pairs:
            for end in ends:
                undo.callback(end.close)
        leader = GroupPlace(0, str(meeting), tuple(ours.fileno() for ours, _ in pairs))
        places = [leader]
        for number, (_, theirs) in enumerate(pairs, 1):
            places.append(GroupPlace(number, str(meeting), (theirs.fileno(),)))
        processes: list[EngineProcess] = []
        for place in places:
            process = await spawn_engine(executor, config, arena_fd, place)
            undo.callback(process.kill)
            processes.append(process)
        undo.pop_all()
        for ends in pairs:
            for end in ends:
                end.close()
        return EngineGroup(processes, meeting)
