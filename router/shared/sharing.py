"""The state that this router shares with others, through Redis, or its own memory alone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraplex.router.background import Background
from loraplex.router.config import RouterConfig
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.steady_clock import SteadyClock
from loraplex.router.shared.store import Shelf, Store

if TYPE_CHECKING:
    from loraplex.router.shared.redis_link import RedisLink


@dataclass(frozen=True, slots=True)
class Sharing:
    """The store that routers share, and the link to it. link, shelf: None = one router alone."""

    store: Store
    link: "RedisLink | None" = None
    shelf: Shelf | None = None

    @property
    def is_up(self) -> bool:
        return self.link is None or self.link.is_up

    @asynccontextmanager
    async def run(self, background: Background) -> AsyncIterator[None]:
        """Keeps the connection while inside, and makes it again whenever it was lost."""
        if self.link is None:
            yield
            return
        try:
            async with background.running(self.link.run()):
                yield
        finally:
            await self.link.close()


def make_sharing(config: RouterConfig) -> Sharing:
    """Makes the store that routers share, or one in memory without Redis. Raises ValueError for a
    URL that cannot be; connects to nothing yet.
    """
    if not config.redis:
        return Sharing(MemoryStore(SteadyClock()))
    # The client library is needed, and takes its time to load, only where there is a Redis.
    from loraplex.router.shared.redis_link import RedisLink
    from loraplex.router.shared.redis_store import RedisStore

    link = RedisLink(
        config.redis, config.redis_timeout_s, config.redis_password or None, config.redis_prefix
    )
    store = RedisStore(link, config.redis_prefix)
    return Sharing(store, link, store)
