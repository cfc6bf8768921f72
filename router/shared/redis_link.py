"""The connection to Redis: every call is short, a Redis that does not answer is asked no more.

A call that fails or is late opens the circuit. From then on calls fail at once, while a task asks,
ever less often, whether Redis is back.
"""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from loraplex.adapters.common.bounded import bounded
from loraplex.router.shared.store import StoreDown

logger = logging.getLogger(__name__)

# A call takes a fraction of a millisecond; a burst of calls must not become one of handshakes.
MAX_CONNECTIONS = 8
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
_SOCKET_TIMEOUT_S = 2.0
_SENTINEL = "redis+sentinel://"
_SCHEMES = ("redis://", "rediss://", "unix://", _SENTINEL)

_DATABASE = re.compile(r"/?|/[0-9]{1,5}")
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")

T = TypeVar("T")


class RedisLink:
    """The router's connection to Redis. timeout_s: the longest that a call may take, unless it asks
    for more. prefix: of the key that is written to learn whether Redis is back; who may write
    others may not write more.
    """

    def __init__(
        self, url: str, timeout_s: float, password: str | None = None, prefix: str = "loraplex"
    ) -> None:
        """Makes the client. Raises ValueError for a URL that cannot be; connects to nothing."""
        self.is_up = True
        self.client = _client(url, password)
        self.timeout_s = timeout_s
        self._ping = f"{prefix}:ping"
        self._tripped = asyncio.Event()
        self._fault = ""
        self._closed = False
        self._working: set[asyncio.Task[Any]] = set()

    async def call(self, work: Callable[[], Awaitable[T]], least_s: float = 0.0) -> T:
        """Runs a call to Redis in its time, of at least `least_s`. Raises StoreDown."""
        if not self.is_up:
            raise StoreDown("Redis does not answer")
        try:
            return await bounded(self._work(work), max(self.timeout_s, least_s))
        except (RedisError, OSError, TimeoutError) as error:
            self._trip(error)
            raise StoreDown("Redis does not answer") from error

    async def run(self) -> None:
        """Brings the connection back whenever it is lost, until cancelled."""
        while True:
            await self._tripped.wait()
            await self._until_back()
            self._tripped.clear()
            self.is_up = True
            logger.info("Redis answers again")

    async def close(self) -> None:
        """Closes the connections, after `run`. Calls that have begun end first, each within its
        time; later calls fail.

        The client closes the connections that it has. A call that is still connecting would leave
        its connection open, and a call after this would make a new one.
        """
        self._closed = True
        if self._working:
            # A call that was cancelled may go on until the client's own limit.
            await asyncio.wait(self._working, timeout=self.timeout_s + 2 * _SOCKET_TIMEOUT_S)
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await bounded(self.client.aclose(), _SOCKET_TIMEOUT_S)

    async def _until_back(self) -> None:
        delay, logged = _FIRST_DELAY_S, self._fault
        while True:
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            try:
                await bounded(self._work(self._write), max(self.timeout_s, delay / 2))
                return
            except (RedisError, OSError, TimeoutError) as error:
                fault = _kind(error)
                if fault != logged:
                    logger.warning("Redis is still not back (%s)", fault)
                logged = fault
                delay = min(2 * delay, _LONGEST_DELAY_S)

    async def _work(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs a call as a task, which may outlive its caller. Raises StoreDown after `close`."""
        if self._closed:
            raise StoreDown("the connection to Redis is closed")
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._working.add(task)
        try:
            return await work()
        finally:
            self._working.discard(task)

    async def _write(self) -> None:
        """Writes a key to learn whether Redis is back. A replica, or one that is loading, is there
        to be read only: it is not back yet.
        """
        await self.client.set(self._ping, b"", px=1000)

    def _trip(self, error: BaseException) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self._fault = _kind(error)
        logger.warning("Redis does not answer (%s); going on without it", self._fault)
        self._tripped.set()


def _kind(error: BaseException) -> str:
    """The type of the error alone, since messages may hold addresses and credentials.

    The reason why a connection was not made stands behind an error of the library's own.
    """
    return type(error.__cause__ or error).__name__


def _client(url: str, password: str | None) -> Redis:
    if not url.startswith(_SCHEMES):
        raise ValueError(f"expected {', '.join(f'{scheme}…' for scheme in _SCHEMES)}")
    if urlsplit(url).password is not None:
        raise ValueError(
            "a URL shows in the list of processes: give the password as "
            "--redis-password-file or LORAPLEX_REDIS_PASSWORD"
        )
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _SOCKET_TIMEOUT_S,
        "socket_timeout": _SOCKET_TIMEOUT_S,
    }
    if password is not None:
        options["password"] = password
    if url.startswith(_SENTINEL):
        return _behind_sentinels(url, options)
    pool = BlockingConnectionPool.from_url(
        url, timeout=None, max_connections=MAX_CONNECTIONS, **options
    )
    _check(url, pool)
    return Redis.from_pool(pool)


def _check(url: str, pool: BlockingConnectionPool) -> None:
    """Checks Redis's URL. Raises ValueError for what always fails, or means another database."""
    parts = urlsplit(url)
    if url.startswith("unix://"):
        if parts.path.strip("/") == "":
            raise ValueError("expected unix:///path/to/socket")
    elif not parts.hostname or not _DATABASE.fullmatch(parts.path):
        raise ValueError(f"expected {parts.scheme}://host:port/database, a number")
    try:
        connection = pool.make_connection()  # type: ignore[no-untyped-call]
        if isinstance(connection, SSLConnection):
            connection.ssl_context.get()
    except (TypeError, RedisError) as error:
        raise ValueError(f"of its parameters: {error}") from error
    except OSError as error:
        files = [f"{k}={v}" for k, v in pool.connection_kwargs.items() if k in _FILES]
        why = error.strerror or str(error)
        raise ValueError(f"{', '.join(files)} cannot be used: {why}") from error


def _behind_sentinels(url: str, options: dict[str, Any]) -> Redis:
    """redis+sentinel://[user@]host[:port],…/service: the sentinels say who is master."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2].split(",")
    service = parts.path.strip("/")
    if not service or not all(hosts):
        raise ValueError("expected redis+sentinel://host:port,host:port/service")
    addresses = [_address(host) for host in hosts]
    if parts.username:
        options["username"] = unquote(parts.username)
    sentinel = Sentinel(addresses, sentinel_kwargs=dict(options))  # type: ignore[no-untyped-call]
    return cast(Redis, sentinel.master_for(service, **options))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    return host, int(port or 26379)
