"""A real redis-server on a Unix socket, and what may befall it."""

import asyncio
import shutil
import signal
import subprocess
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
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    async def start(self) -> None:
        process = self._process = self._spawn()
        async with Redis.from_url(self.url) as client:

            async def answers() -> bool:
                assert process.poll() is None, self._log.read_text()
                try:
                    async with asyncio.timeout(ANSWER_S):
                        return bool(await client.ping())
                except (OSError, RedisError):  # TimeoutError is an OSError
                    return False

            await poll(answers, START_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        """A process that outlives the event loop."""
        assert PROGRAM, "the tests need redis-server on the PATH"
        return subprocess.Popen(tethered(PROGRAM, *self._options))

    async def kill(self) -> None:
        self.end()

    def end(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
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
        self._process.send_signal(number)


@asynccontextmanager
async def running_redis(*options: str) -> AsyncIterator[RedisServer]:
    # The path of a Unix socket may have 107 bytes: pytest's folders are longer.
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), *options)
        await server.start()
        try:
            yield server
        finally:
            server.end()
