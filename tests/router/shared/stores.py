"""Stores to test with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.redis_store import RedisStore
from tests.ports import free_port
from tests.router.serving import poll
from tests.router.shared.redis_server import running_redis


@asynccontextmanager
async def redis_store(*options: str) -> AsyncIterator[RedisStore]:
    is_cluster = "--cluster-enabled" in options
    if is_cluster:  # else the port of its bus is the same for all
        options += ("--cluster-port", str(free_port()))
    async with running_redis(*options) as server:
        if is_cluster:
            await server.command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

            async def covered() -> bool:
                return "cluster_state:ok" in str(await server.command("CLUSTER", "INFO"))

            await poll(covered)
        link = RedisLink(server.url, timeout_s=5.0)
        running = asyncio.create_task(link.run())
        try:
            yield RedisStore(link, "test")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await link.close()
