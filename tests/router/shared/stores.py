"""Stores to test with."""

import asyncio
import atexit
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.redis_store import RedisStore
from tests.ports import free_port
from tests.router.serving import poll
from tests.router.shared.redis_server import RedisServer

# Of each kind one for all tests: a cluster takes seconds to begin.
_servers: dict[tuple[str, ...], RedisServer] = {}


@asynccontextmanager
async def redis_store(*options: str) -> AsyncIterator[RedisStore]:
    """An empty store, in a server that others had before."""
    if options not in _servers:
        _servers[options] = await _start(options)
    server = _servers[options]
    await server.command("FLUSHALL")
    await server.command("SCRIPT FLUSH")
    link = RedisLink(server.url, timeout_s=5.0)
    running = asyncio.create_task(link.run())
    try:
        yield RedisStore(link, "test")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await link.close()


async def _start(options: tuple[str, ...]) -> RedisServer:
    folder = tempfile.TemporaryDirectory(prefix="redis-")
    atexit.register(folder.cleanup)
    is_cluster = "--cluster-enabled" in options
    # Else the port of its bus is the same for all.
    more = ("--cluster-port", str(free_port())) if is_cluster else ()
    server = RedisServer(Path(folder.name), *options, *more)
    atexit.register(server.end)
    await server.start()
    if is_cluster:
        await server.command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def covered() -> bool:
            return "cluster_state:ok" in str(await server.command("CLUSTER", "INFO"))

        await poll(covered)
    return server
