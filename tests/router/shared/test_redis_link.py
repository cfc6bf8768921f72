"""A link that was lost comes back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.store import StoreDown
from tests.router.serving import poll
from tests.router.shared.redis_server import running_redis


async def fails() -> None:
    raise OSError


@asynccontextmanager
async def lost_link(password: str) -> AsyncIterator[RedisLink]:
    """Of a user who may write the prefix alone, and whose password is `pw`; it was lost once."""
    async with running_redis() as server:
        await server.command("ACL", "SETUSER", "lx", "on", ">pw", "~fleet:*", "+@all")
        link = RedisLink(server.url.replace("://", "://lx@"), 5.0, password, prefix="fleet")
        running = asyncio.create_task(link.run())
        try:
            with pytest.raises(StoreDown):
                await link.call(fails)
            yield link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await link.close()


async def test_for_who_may_write_its_prefix_alone() -> None:
    async with lost_link("pw") as link:

        async def back() -> bool:
            return link.is_up

        await poll(back)


async def test_a_reason_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async with lost_link("other"):

        async def reported() -> bool:
            return "still not back (AuthenticationError)" in caplog.text

        await poll(reported)
        assert "does not answer (OSError)" in caplog.text
        assert caplog.text.count("still not back") == 1


async def test_close_leaves_no_connection_open() -> None:
    """However far a call is: not begun, connecting, in the handshake, waiting for its answer."""
    async with running_redis() as server:
        for steps in range(40):
            link = RedisLink(server.url, 5.0)
            pinging = asyncio.create_task(link.call(link.client.ping))
            for _ in range(steps):
                await asyncio.sleep(0)
            await link.close()
            with contextlib.suppress(StoreDown):  # it had not begun
                assert await pinging is True
            with pytest.raises(StoreDown):
                await link.call(link.client.ping)
            pool = link.client.connection_pool
            made = [*pool._available_connections, *pool._in_use_connections]
            assert not any(connection.is_connected for connection in made), steps
