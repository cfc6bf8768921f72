"""A real redis-server on a Unix socket, and what may befall it."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.router.serving import poll
from tests.tethered import tethered

# On a machine that is busy.
START_S = 240.0
ANSWER_S = 5.0
PROGRAM = shutil.which("redis-server")


class RedisServer:
    """Keeps nothing on disk: one that starts again is empty."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "redis.sock"
        self._log = folder / "log"
        self._options = (
            *("--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--logfile", str(self._log), *options),
        )
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    async def start(self) -> None:
        assert PROGRAM, "the tests need redis-server on the PATH"
        process = self._process = await asyncio.create_subprocess_exec(
            *tethered(PROGRAM, *self._options)
        )
        async with Redis.from_url(self.url) as client:

            async def answers() -> bool:
                assert process.returncode is None, self._log.read_text()
                try:
                    async with asyncio.timeout(ANSWER_S):
                        return bool(await client.ping())
                except (OSError, RedisError):  # TimeoutError is an OSError
                    return False

            await poll(answers, START_S)

    async def kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
            await process.wait()
        self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def command(self, *words: str | int) -> object:
        async with Redis.from_url(self.url) as client:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


@asynccontextmanager
async def running_redis(*options: str) -> AsyncIterator[RedisServer]:
    # The path of a Unix socket may have 107 bytes: pytest's folders are longer.
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), *options)
        await server.start()
        try:
            yield server
        finally:
            await server.kill()
