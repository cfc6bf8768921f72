"""A bad network between two processes: a TCP proxy whose directions stall, lag or are slow."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CHUNK_BYTES = 16 << 10


class Direction:
    """What happens to bytes on their way. Bytes under way keep their order and none is lost.

    delay_s: for which each is under way. bytes_per_s: 0 = no limit.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0
        self._flows = asyncio.Event()
        self._flows.set()

    def stall(self) -> None:
        """Nothing arrives any more, and nobody is told: as when packets are dropped."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    @property
    def is_free(self) -> bool:
        """Whether a chunk arrives at once."""
        return self._flows.is_set() and not (self.delay_s or self.bytes_per_s)

    async def pass_on(self, chunk: bytes, sent_at: float) -> None:
        """Returns when the chunk has arrived."""
        loop = asyncio.get_running_loop()
        if self.bytes_per_s:
            await asyncio.sleep(len(chunk) / self.bytes_per_s)
        await asyncio.sleep(max(0.0, sent_at + self.delay_s - loop.time()))
        await self._flows.wait()


class Link:
    """Listens at `at` (0 = any port) for what connects to `port`. there: to it; back: from it.

    The end of a connection waits behind its last bytes, as on a network.
    """

    def __init__(self, port: int, at: int = 0) -> None:
        self.there = Direction()
        self.back = Direction()
        self.port = at
        self._to = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """For a WebSocket."""
        return f"ws://127.0.0.1:{self.port}"

    @property
    def directions(self) -> tuple[Direction, Direction]:
        return self.there, self.back

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.reset()

    async def reset(self) -> None:
        """Ends all connections, as a middlebox does that has forgotten them."""
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def heal(self) -> None:
        for direction in self.directions:
            direction.delay_s, direction.bytes_per_s = 0.0, 0
            direction.flow()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # which asyncio's server would log
                await self._join(reader, writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one end is gone."""
        await self.there.pass_on(b"", asyncio.get_running_loop().time())
        try:
            answers, onward = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(self.there, reader, onward))
                both.create_task(_pump(self.back, answers, writer))
        except* OSError:
            pass
        finally:
            onward.transport.abort()


async def _pump(
    direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Raises ConnectionError at the end, behind the last byte."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[bytes, float]] = asyncio.Queue(64)
    num_under_way = 0

    async def arrive(chunk: bytes) -> None:
        if not chunk or writer.is_closing():  # uvloop would raise RuntimeError
            raise ConnectionResetError
        writer.write(chunk)
        await writer.drain()

    async def send() -> None:
        nonlocal num_under_way
        while True:
            chunk, sent_at = await under_way.get()
            await direction.pass_on(chunk, sent_at)
            await arrive(chunk)
            num_under_way -= 1

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        chunk = b"-"
        while chunk:
            try:
                chunk = await reader.read(_CHUNK_BYTES)
            except ConnectionError:
                chunk = b""
            if direction.is_free and not num_under_way:
                await arrive(chunk)
            else:
                num_under_way += 1
                await under_way.put((chunk, loop.time()))


@asynccontextmanager
async def running_link(port: int) -> AsyncIterator[Link]:
    link = Link(port)
    await link.start()
    try:
        yield link
    finally:
        await link.close()
