"""Enlists this worker in the Redis that routers look for workers in. Nothing waits for it.

The layout is that of the router's store (`router/shared/redis_store.py`): a group's members and
the ends of their leases.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError

from loraplex.adapters.common.bounded import bounded
from loraplex.adapters.common.worker_record import GROUP, LEASE_S, WorkerRecord, signed
from loraplex.server.config import WorkerConfig
from loraplex.server.worker.address import AddressError

log = logging.getLogger(__name__)

PERIOD_S = 2.0
_TIMEOUT_S = 2.0
# Returns 0 when another of this name, begun later, is there.
_LEASE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ending = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ending and tonumber(ending) > now then
  local there = cjson.decode(redis.call('HGET', KEYS[2], ARGV[1]) or '{"epoch": 0}')
  if tonumber(there.epoch) > tonumber(ARGV[4]) then return 0 end
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""
# Only one's own: another may have come in its place.
_UNLEASE = """
if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
return 1
"""


class Registry:
    """Keeps the worker listed in Redis, by `run`, while `is_listed` says so."""

    def __init__(self, config: WorkerConfig, url: str, worker_id: str) -> None:
        """Prepare to register. Raises AddressError for a URL of Redis that cannot be."""
        self._secret = config.secret
        self._url = url
        self._worker_id = worker_id
        stem = f"{config.redis_prefix}:{{group:{GROUP}}}"
        self._keys = (f"{stem}:ends", f"{stem}:members")
        self._redis = _client(config)
        self._problem: str | None = None
        self._record = b""

    async def run(self, epoch: Callable[[], int], is_listed: Callable[[], bool]) -> None:
        try:
            while True:
                await self._try(self._announce(epoch()) if is_listed() else self._leave())
                await asyncio.sleep(PERIOD_S)
        finally:
            await self._try(self._leave())
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._redis.aclose()

    async def _announce(self, epoch: int) -> None:
        record = signed(WorkerRecord(self._worker_id, self._url, epoch), self._secret)
        arguments = (self._worker_id, record, int(LEASE_S * 1000), epoch)
        if not await self._eval(_LEASE, *arguments):
            raise _Superseded
        self._record = record

    async def _leave(self) -> None:
        if self._record:
            record, self._record = self._record, b""
            await self._eval(_UNLEASE, self._worker_id, record)

    async def _eval(self, script: str, *arguments: str | bytes | int) -> Any:
        return await self._redis.eval(script, len(self._keys), *self._keys, *arguments)

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        problem = None
        try:
            await bounded(work, _TIMEOUT_S)
        except _Superseded:
            problem = f"another worker that began later is called {self._worker_id}"
        except (RedisError, OSError, TimeoutError) as error:
            # Of the error only its kind: messages may hold addresses and credentials.
            problem = f"Redis does not answer ({type(error).__name__})"
        if problem != self._problem:
            if problem is None and self._record:
                log.info("enlisted for routers as %s", self._url)
            elif problem is not None:
                log.warning("not enlisted for routers: %s", problem)
        self._problem = problem


class _Superseded(Exception):
    pass


def _client(config: WorkerConfig) -> Redis:
    if urlsplit(config.redis).password is not None:
        raise AddressError(
            "--redis: a URL shows in the list of processes: give the password as "
            "--redis-password-file or LORAPLEX_REDIS_PASSWORD"
        )
    options: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
    if config.redis_password:
        options["password"] = config.redis_password
    try:
        return Redis.from_url(config.redis, **options)
    except ValueError as error:
        raise AddressError("--redis: expected redis://, rediss:// or unix://") from error
