"""A link that was lost comes back."""

import asyncio

import pytest

from router.shared.redis_link import RedisLink
from router.shared.store import StoreDown
from tests.router.serving import poll
from tests.router.shared.redis_server import running_redis


async def fails() -> None:
    raise OSError


async def test_for_who_may_write_its_prefix_alone() -> None:
    async with running_redis() as server:
        await server.command("ACL", "SETUSER", "lx", "on", ">pw", "~fleet:*", "+@all")
        url = server.url.replace("://", "://lx@")
        link = RedisLink(url, 5.0, "pw", prefix="fleet")
        running = asyncio.create_task(link.run())
        try:
            with pytest.raises(StoreDown):
                await link.call(fails)

            async def back() -> bool:
                return link.is_up

            await poll(back)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await link.close()


async def test_each_reason_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running_redis() as server:
        await server.command("ACL", "SETUSER", "lx", "on", ">pw", "~fleet:*", "+@all")
        url = server.url.replace("://", "://lx@")
        link = RedisLink(url, 5.0, "other", prefix="fleet")
        running = asyncio.create_task(link.run())
        try:
            with pytest.raises(StoreDown):
                await link.call(fails)

            async def told() -> bool:
                return "still not back (AuthenticationError)" in caplog.text

            await poll(told)
            assert "does not answer (OSError)" in caplog.text
            assert caplog.text.count("still not back") == 1
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await link.close()
