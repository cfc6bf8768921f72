"""Work on what routers share, again and again."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from loraplex.router.shared.store import StoreDown


async def every(period_s: float, work: Callable[[], Awaitable[object]]) -> None:
    """Does some work again and again, until cancelled. While the store is down it is tried anew."""
    while True:
        with contextlib.suppress(StoreDown):
            await work()
        await asyncio.sleep(period_s)
