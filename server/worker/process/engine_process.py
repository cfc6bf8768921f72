"""One life of the engine process: start it, exchange frames with it, see it die."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from typing import NamedTuple

import msgspec

from loraplex.server.config import EngineConfig
from loraplex.server.engine.framing import MAX_FRAME_BYTES
from loraplex.server.engine.messages import (
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
            with contextlib.suppress(TimeoutError):
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
    with contextlib.ExitStack() as undo:
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
