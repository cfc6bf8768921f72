"""One life of an engine: start its processes, exchange frames with the first, see one die. The
processes of an engine live and die together."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from loraplex.server.config import EngineConfig
from loraplex.server.engine.framing import MAX_FRAME_BYTES
from loraplex.server.engine.messages import (
    Alive,
    EngineFailed,
    FromEngine,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)
from loraplex.server.worker import tether

ENGINE_MODULE = "loraplex.server.engine.main"
LENGTH_BYTES = 4
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


class EngineDied(Exception):
    """The engine process is gone or no longer speaks the protocol; str() says how it ended.

    from_outside: a person ended it, or the system when memory was short.
    """

    def __init__(self, how: str, from_outside: bool = False) -> None:
        super().__init__(how)
        self.from_outside = from_outside


class EngineProcess:
    """A running engine. `receive` never returns after the first EngineDied."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._exited = asyncio.Event()
        self._killed_here = False
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._exited.set()

    def send(self, frame: ToEngine) -> None:
        """Queue a frame. Frames to a dead engine are lost; `receive` reports its death."""
        if self._writer.is_closing():
            return  # uvloop's transports raise when they are written to after their end
        body = encode(frame)
        self._writer.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)

    async def receive(self) -> FromEngine:
        """The next frame. Raises EngineDied."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length > MAX_FRAME_BYTES:
                raise EngineDied(f"it sent a frame of {length} bytes")
            frame: FromEngine = decode_from_engine(await self._reader.readexactly(length))
            return frame
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._last_words() from error
        except msgspec.MsgspecError as error:
            raise EngineDied(f"it sent a malformed frame ({error})") from error

    async def _last_words(self) -> EngineDied:
        """A closed pipe is the end of an engine: one that stays alive without it is killed."""
        try:
            await asyncio.wait_for(self._exited.wait(), 1.0)
        except TimeoutError:
            return EngineDied("it closed its pipe")
        code = self._process.returncode
        if code is not None and code < 0:
            hint = " (is memory short?)" if -code == signal.SIGKILL else ""
            from_outside = -code in _FROM_OUTSIDE and not self._killed_here
            return EngineDied(f"killed by {signal.Signals(-code).name}{hint}", from_outside)
        return EngineDied(f"it left with code {code}")

    def kill(self) -> None:
        if not self._exited.is_set():
            self._killed_here = True
            self._process.kill()

    async def close(self, grace_s: float) -> None:
        """Ask it to leave, and kill it when it has not after grace_s. It is gone on return."""
        if not self._exited.is_set() and grace_s > 0:
            self.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), grace_s)
        self.kill()
        await self._exited.wait()
        self._writer.close()


class GroupPlace(NamedTuple):
    """The place of a process in a group that shares the model.

    links: sockets to the others, for the first process; else to the first.
    """

    number: int
    meeting: str
    links: tuple[int, ...]


async def spawn_engine(
    executor: str, config: EngineConfig, arena_fd: int, place: GroupPlace | None = None
) -> EngineProcess:
    """Start an engine process; its first frame says whether it is ready. On the main thread.
    place: None = it has the whole model.

    Raises OSError, and leaves nothing behind then.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as undo:
        undo.callback(ours.close)
        process = spawn_process(executor, config, arena_fd, theirs, place)
        undo.callback(process.kill)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        undo.callback(writer.close)
        engine = EngineProcess(process, reader, writer)
        undo.pop_all()
        return engine


def spawn_process(
    executor: str,
    config: EngineConfig,
    arena_fd: int,
    theirs: socket.socket,
    place: GroupPlace | None,
) -> subprocess.Popen[bytes]:
    """Spawn an engine process. theirs: the engine's end of its pipe to the worker."""
    with theirs:
        arguments = [
            *("--executor", executor),
            *("--socket-fd", str(theirs.fileno())),
            *("--arena-fd", str(arena_fd)),
            *("--config", msgspec.json.encode(config).decode()),
        ]
        links: tuple[int, ...] = ()
        if place is not None:
            links = place.links
            arguments += ["--shard", str(place.number), "--meeting", place.meeting]
            arguments += [f"--link-fd={link}" for link in links]
        return tether.spawn(ENGINE_MODULE, arguments, pass_fds=(theirs.fileno(), arena_fd, *links))


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
