"""The store of many routers, in Redis 6.2 or newer. What must be one step is a Lua script.

Keys that one script touches share a hash tag, so that a Redis Cluster keeps them together; time is
the server's.
"""

import hashlib
import logging
import secrets
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, cast

from redis.exceptions import NoScriptError

from loraplex.router.policy.batch_limits import ResponsesLimits
from loraplex.router.policy.quota import REASONS, Ask, Standing, Subject, Verdict
from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.store import (
    MAX_COUNTERS,
    MAX_ROWS,
    Row,
    Settlement,
    Table,
    TableFull,
    life_of,
)

logger = logging.getLogger(__name__)

# For what is large, and nobody's request waits for.
PATIENCE_S = 2.0
_SCANNED = 2000  # rows in one answer, counters of several books, entries of several logs
_ASKED = 1000  # keys of one question
_STANDING = 5  # numbers that `admit` returns for each subject


class _Script:
    def __init__(self, name: str) -> None:
        self.text = (files("loraplex.router.shared") / "lua" / f"{name}.lua").read_text()
        # The name of a script in Redis is its SHA-1.
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


_NAMES = ("admit", "settle", "renew", "put", "swap", "count", "lease", "leased", "shelve")


class RedisStore:
    """A Store and a Shelf. prefix: of every key, so that fleets may share a Redis."""

    def __init__(self, link: RedisLink, prefix: str) -> None:
        self.link = link
        self._redis = link.client
        self._prefix = prefix
        self._scripts = {name: _Script(name) for name in _NAMES}

    async def get(self, key: str) -> bytes | None:
        return cast("bytes | None", await self.link.call(lambda: self._redis.get(self._value(key))))

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self.link.call(lambda: self._redis.set(self._value(key), value, px=_ms(ttl_s)))

    async def add(self, key: str, value: bytes, ttl_s: float) -> bytes | None:
        # SET NX GET needs Redis 7: one that was there may be gone when it is asked for.
        name = self._value(key)

        async def add() -> bytes | None:
            while not await self._redis.set(name, value, px=_ms(ttl_s), nx=True):
                there = await self._redis.get(name)
                if there is not None:
                    return cast(bytes, there)
            return None

        return await self.link.call(add)

    async def swap(self, key: str, old: bytes, new: bytes | None, ttl_s: float) -> bool:
        arguments = (old, "0" if new is None else "1", new or b"", _ms(ttl_s))
        return bool(await self._run("swap", [self._value(key)], *arguments))

    async def version(self, table: str) -> str:
        _, version, _ = self._table(table)
        answer = await self.link.call(lambda: _wait(self._redis.hmget(version, ["name", "writes"])))
        return _version(answer)

    async def read(self, table: str, since: str = "") -> Table:
        rows, version, order = self._table(table)
        after = f"({since.partition(':')[2] or '0'}"
        answer, found = await self._together(
            ("HMGET", version, "name", "writes", "ordered"),
            ("ZRANGEBYSCORE", order, after, "+inf" if since else "-inf"),
            least_s=PATIENCE_S,
        )
        now = _version(answer[:2])
        if not since:
            scanned = await self._scanned(table)
            is_whole = life_of(await self.version(table)) == life_of(now)
            # One that was emptied meanwhile would look as if its rows had been taken out.
            return Table(now, scanned) if is_whole else await self.read(table)
        # Routers that know of no order leave their writes out of it.
        if answer[1] != answer[2] or life_of(now) != life_of(since):
            return await self.read(table)
        keys = cast("list[bytes]", found)
        values = await self._values_of(rows, keys) if keys else []
        return Table(now, _rows(table, zip(keys, values, strict=True)), is_whole=False)

    async def _scanned(self, table: str) -> dict[str, Row]:
        """All rows of a table. What is written meanwhile comes with the next read, whose `since` is
        the version from before.
        """
        rows, cursor, found = self._table(table)[0], 0, dict[str, Row]()
        while True:
            scan = partial(self._scan, rows, cursor)
            cursor, some = await self.link.call(scan, PATIENCE_S)
            found |= _rows(table, some.items())
            if not cursor:
                return found

    async def _scan(self, rows: str, cursor: int) -> tuple[int, dict[bytes, bytes]]:
        found = await _wait(self._redis.hscan(rows, cursor, count=_SCANNED))
        return cast("tuple[int, dict[bytes, bytes]]", found)

    async def _values_of(self, rows: str, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return cast(
            "list[bytes | None]",
            await self.link.call(lambda: _wait(self._redis.hmget(rows, list(keys))), PATIENCE_S),
        )

    async def put(self, table: str, key: str, row: Row) -> bool:
        name = secrets.token_hex(8)
        arguments = (key, row.revision, row.value, MAX_ROWS, name)
        done = await self._run("put", list(self._table(table)), *arguments)
        if done < 0:
            raise TableFull
        return bool(done)

    async def forget(self, table: str, keys: Sequence[str]) -> None:
        rows, version, order = self._table(table)
        counted = (("HINCRBY", version, name, 1) for name in ("writes", "ordered"))
        await self._together(("HDEL", rows, *keys), ("ZREM", order, *keys), *counted)

    async def lease(self, group: str, member: str, value: bytes, ttl_s: float) -> None:
        await self._run("lease", self._group(group), member, value, _ms(ttl_s))

    async def unlease(self, group: str, member: str) -> None:
        ends, members = self._group(group)
        await self._together(("ZREM", ends, member), ("HDEL", members, member))

    async def leased(self, group: str) -> dict[str, bytes]:
        flat = await self._run("leased", self._group(group))
        return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}

    async def append(self, log: str, entries: Sequence[bytes], keep: int) -> None:
        name = f"{self._prefix}:log:{log}"
        if entries:
            await self._together(("LPUSH", name, *entries), ("LTRIM", name, 0, keep - 1))

    async def tails(self, logs: Sequence[str], count: int) -> list[list[bytes]]:
        sizes = {f"{self._prefix}:log:{log}": count for log in logs}
        return [
            entries
            for some in _parts(sizes, _SCANNED)
            for entries in await self._of_each("LRANGE", some, 0, count - 1)
        ]

    async def count(
        self, book: str, amounts: Mapping[str, int], groups: Mapping[str, str], ttl_s: float
    ) -> None:
        triples = [part for c, amount in amounts.items() for part in (c, groups[c], amount)]
        name = f"{self._prefix}:book:{book}"
        await self._run("count", [name], _ms(ttl_s), MAX_COUNTERS, *triples, least_s=PATIENCE_S)

    async def counts(self, books: Sequence[str]) -> list[dict[str, int]]:
        names = [f"{self._prefix}:book:{book}" for book in books]
        sizes = dict[str, int]()
        for some in _parts(dict.fromkeys(names, 1), _ASKED):
            sizes |= zip(some, await self._of_each("HLEN", some), strict=True)
        found = dict[str, dict[bytes, bytes]]()
        for some in _parts({name: size for name, size in sizes.items() if size}, _SCANNED):
            found |= zip(some, await self._of_each("HGETALL", some), strict=True)
        return [{k.decode(): int(v) for k, v in found.get(name, {}).items()} for name in names]

    async def _of_each(self, command: str, names: Sequence[str], *arguments: int) -> list[Any]:
        """Answers of one command for each of some keys."""
        commands = [(command, name, *arguments) for name in names]
        return await self._together(*commands, least_s=PATIENCE_S, transaction=False)

    async def _together(
        self, *commands: tuple[Any, ...], least_s: float = 0.0, transaction: bool = True
    ) -> list[Any]:
        """Answers of commands, on one way to Redis and back."""

        async def ask() -> list[Any]:
            async with self._redis.pipeline(transaction=transaction) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()

        return await self.link.call(ask, least_s)

    async def admit(self, ask: Ask) -> Verdict:
        limits = [number for subject in ask.subjects for number in _limits(subject)]
        keys = self._accounts(ask)
        answer = await self._run("admit", keys, ask.lease, ask.lease_ms, ask.tokens, *limits)
        now_ms, reason, subject, retry_ms = answer[:4]
        numbers = [answer[at : at + _STANDING] for at in range(4, len(answer), _STANDING)]
        standings = tuple(Standing(*of_one) for of_one in numbers)
        if not reason:
            return Verdict(now_ms, standings)
        return Verdict(now_ms, standings, REASONS[reason - 1], subject, retry_ms)

    async def settle(self, settlement: Settlement) -> tuple[int, int]:
        ask = settlement.ask
        pairs = zip(ask.subjects, settlement.verdict.standings, strict=True)
        rest = [n for s, standing in pairs for n in (_limits(s)[1], standing.window)]
        used = settlement.used
        answer = await self._run("settle", self._accounts(ask), ask.lease, ask.tokens, used, *rest)
        now_ms, counted = answer
        return now_ms, counted

    async def renew(self, asks: Sequence[Ask]) -> None:
        by_key: dict[tuple[str, int], list[str]] = {}
        for ask in asks:
            for leases in self._accounts(ask)[1::2]:
                by_key.setdefault((leases, ask.lease_ms), []).append(ask.lease)
        for (key, lease_ms), leases_of_key in by_key.items():
            await self._run("renew", [key], lease_ms, *leases_of_key)

    async def shelved(self, tenant: str, name: str) -> bytes:
        values, _ = self._shelf(tenant)
        found = await self.link.call(lambda: _wait(self._redis.hget(values, name)), PATIENCE_S)
        return cast("bytes | None", found) or b""

    async def shelve(
        self, tenant: str, name: str, old: bytes, new: bytes, limits: ResponsesLimits, least: str
    ) -> bool:
        bounds = (limits.tenant_count, limits.tenant_bytes, least, _ms(limits.keep_s))
        keys = self._shelf(tenant)
        return bool(await self._run("shelve", keys, name, old, new, *bounds, least_s=PATIENCE_S))

    async def _run(
        self, name: str, keys: Sequence[str], *arguments: str | bytes | int, least_s: float = 0.0
    ) -> Any:
        script = self._scripts[name]

        async def run() -> Any:
            try:
                return await _wait(self._redis.evalsha(script.sha, len(keys), *keys, *arguments))
            except NoScriptError:  # EVAL keeps it, and is allowed where SCRIPT LOAD is not
                return await _wait(self._redis.eval(script.text, len(keys), *keys, *arguments))

        return await self.link.call(run, least_s)

    def _value(self, key: str) -> str:
        """The name of a value: its key, without an owner between the kind and the id. There is room
        for all here, and routers that do not divide it find each other's values.
        """
        kind, colon, rest = key.partition(":")
        return f"{self._prefix}:value:{kind}{colon}{rest.rpartition(':')[2]}"

    def _table(self, table: str) -> tuple[str, str, str]:
        """Rows by key; life and number of writes; keys by their last write."""
        stem = f"{self._prefix}:{{table:{table}}}"
        return f"{stem}:rows", f"{stem}:version", f"{stem}:order"

    def _group(self, group: str) -> list[str]:
        stem = f"{self._prefix}:{{group:{group}}}"
        return [f"{stem}:ends", f"{stem}:members"]

    def _shelf(self, tenant: str) -> list[str]:
        stem = f"{self._prefix}:{{shelf:{tenant}}}"
        return [f"{stem}:values", f"{stem}:order"]

    def _accounts(self, ask: Ask) -> list[str]:
        stem = f"{self._prefix}:{{quota:{ask.tenant}}}"
        keys = ((f"{stem}:{s.name}", f"{stem}:{s.name}:leases") for s in ask.subjects)
        return [key for pair in keys for key in pair]


def _parts(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Names in order, in parts of at most `most` in all, or of one name."""
    part, total = list[str](), 0
    for name, size in sizes.items():
        if part and total + size > most:
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


def _limits(subject: Subject) -> tuple[int, int, int, int, int]:
    limits = subject.limits
    return (
        limits.requests_per_minute or 0,
        limits.tokens_per_minute or 0,
        limits.concurrency or 0,
        limits.budget_tokens or 0,
        limits.budget_period_s * 1000,
    )


def _version(answer: Sequence[bytes | None]) -> str:
    name, writes = answer
    if name is None or writes is None:
        return ""
    return f"{name.decode(errors='replace')}:{writes.decode(errors='replace')}"


def _rows(table: str, answer: Iterable[tuple[bytes, bytes | None]]) -> dict[str, Row]:
    """Reads rows of a table, by key. Rows that no router wrote are left out."""
    rows: dict[str, Row] = {}
    for key, value in answer:
        if value is None:
            continue
        revision, _, rest = value.partition(b":")
        try:
            rows[key.decode()] = Row(int(revision), rest)
        except ValueError:
            logger.warning("Redis: a row of %s cannot be read and is left out", table)
    return rows


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


async def _wait(answer: Any) -> Any:
    """Awaits an answer. The client's types say that it may be there at once; here it never is."""
    return await cast(Awaitable[Any], answer)
