"""Carries out turns of costly work on the event loop, which stays free.

What takes processor time before a request waits for a worker takes a turn: long texts, adapters'
chat templates, trials of grammars. So do fetches of images, which take time and memory.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Literal, TypeVar

import msgspec

from loraplex.adapters.common.awaited_turns import AwaitedTurn, AwaitedTurns
from loraplex.adapters.common.strict_json import count_items
from loraplex.adapters.common.turns import LineFull, Room
from loraplex.router.call import RequestError

# images: all that one request has fetched. image: one fetch.
Kind = Literal["text", "body", "list", "template", "grammar", "images", "image"]

# Encoding runs at a few MB/s, and a thread costs a tenth of a millisecond. Many requests may begin
# together, and each stops the event loop for as long as its short work takes.
INLINE_SIZE = 4 << 10
# An id is decoded in the time in which so many characters are encoded.
DECODED_SIZE = 16
# Processes that render adapters' templates, and as many that try grammars.
PROCESSES = 3
# Processes that fetch images, and requests that may hold half of theirs: nothing else counts those.
FETCHES = 4
_FETCHING = 16
# Who stood behind more would hardly live to see its turn.
_MAX_LINE = 1024
# Of texts in characters: a tokenizer uses up to 400 bytes of memory a character while it works.
# Answers take such turns, too, and are not refused for a full line: their requests are bounded.
ROOMS: dict[str, Room] = {
    "text": Room(2 << 20, 3 << 19, sys.maxsize),
    # Nothing is gained by two at once: Python reads JSON and base64 without giving way.
    "body": Room(1, 1, sys.maxsize),
    "list": Room(1, 1, _MAX_LINE),
    "template": Room(PROCESSES, PROCESSES - 1, _MAX_LINE),
    "grammar": Room(PROCESSES, PROCESSES - 1, _MAX_LINE),
    "images": Room(_FETCHING, _FETCHING * 3 // 4, _MAX_LINE),
    "image": Room(FETCHES, FETCHES - 1, _MAX_LINE),
}
_RETRY_S = 1.0
# JSON is read so many times as fast as text is encoded, and a value as so many characters of text.
_PARSING = 8
_ITEM_SIZE = 4
# Of a list with thousands of items, each of which takes some 50 µs.
_LISTED_AT_ONCE = 32
# Between pieces of JSON. Python takes the interpreter from a thread that asks for it on and on only
# every 5 ms, and the event loop asks several times for each request.
_PAUSE_S = 0.0002

S = TypeVar("S")
T = TypeVar("T")

PIECE_BYTES = 64 << 10
# Items of a longer list are taken for small ones: several are encoded at once.
_FEW = 256

_encode = msgspec.json.Encoder().encode


def in_pieces(answer: Any) -> Iterator[bytes]:
    """JSON in pieces, as of `msgspec.json.encode`. Bytes are JSON; iterators are lists."""
    parts: list[bytes] = []
    size = 0
    for part in _cut(answer) if isinstance(answer, bytes) else _parts(answer):
        parts.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, msgspec.Struct) and _is_plain(value):
        yield from _object(value)
    elif isinstance(value, list | tuple) and len(value) <= _FEW:
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _parts(item)
        yield b"]" if value else b"[]"
    elif isinstance(value, list | tuple | Iterator):
        yield from _list(iter(value))
    elif isinstance(value, str) and len(value) > PIECE_BYTES:
        yield b'"'
        for start in range(0, len(value), PIECE_BYTES):
            yield _encode(value[start : start + PIECE_BYTES])[1:-1]
        yield b'"'
    else:
        yield _encode(value)


def _is_plain(value: msgspec.Struct) -> bool:
    config = value.__struct_config__
    return config.tag is None and not config.array_like and not config.omit_defaults


def _object(value: msgspec.Struct) -> Iterator[bytes]:
    mark = b"{"
    names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
    for name, written in names:
        held = getattr(value, name)
        if held is not msgspec.UNSET:
            yield mark + _encode(written) + b":"
            yield from _parts(held)
            mark = b","
    yield b"}" if mark == b"," else b"{}"


def _list(items: Iterator[Any]) -> Iterator[bytes]:
    """Lists so many items at once as make about a piece."""
    count, mark = 1, b"["
    while some := list(islice(items, count)):
        data = _encode(some)
        yield mark + data[1:-1]
        mark = b","
        count = count * 2 if len(data) < PIECE_BYTES // 2 else max(1, count // 2)
    yield b"]" if mark == b"," else b"[]"


class TurnTaking:
    """Gives callers their turns: all callers of one process."""

    def __init__(self, rooms: Mapping[str, Room] = ROOMS) -> None:
        self._turns = AwaitedTurns(rooms)

    def of(self, tenant: str, is_batch: bool = False) -> "CallersTurns":
        return CallersTurns(self, tenant, is_batch)

    async def enter(self, kind: Kind, size: int, tenant: str, is_batch: bool) -> AwaitedTurn:
        """Returns when a piece of work may begin; `leave` of the result ends its turn.

        size: as `ROOMS` counts it: characters of "text", else processes. Raises RequestError
        (overloaded) when its line is full.
        """
        try:
            return await self._turns.enter(kind, size, tenant, is_batch)
        except LineFull as error:
            message = f"too many requests wait for their {kind} already; try again soon"
            raise RequestError("overloaded", message, retry_after_s=_RETRY_S) from error

    def leave(self, turn: AwaitedTurn) -> None:
        self._turns.leave(turn)


class CallersTurns:
    """Turns of one caller: of a tenant, for live requests or for batches."""

    def __init__(self, taking: TurnTaking, tenant: str, is_batch: bool) -> None:
        self._taking, self._tenant, self._is_batch = taking, tenant, is_batch

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Does work in the caller's turn. size: characters or ids that `work` goes through. Short
        work is done at once, here. Raises RequestError (overloaded)."""
        if size <= INLINE_SIZE:
            return work()
        return await self.run_apart("text", size, work)

    async def parsed(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """The result of `parse` for a request's body. Raises as `run`."""
        size = len(body) // _PARSING
        if size <= INLINE_SIZE:
            size = max(size, count_items(body) * _ITEM_SIZE)
        return await self.read(size, lambda: parse(body))

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Reads a part of a body, as `run` does other work, but one at a time of all callers."""
        if size <= INLINE_SIZE:
            return work()
        return await self.run_apart("body", 1, work)

    async def written(self, size: int, answer: Callable[[], Any]) -> list[bytes]:
        """JSON of what `answer` makes, in pieces (`in_pieces`), at least one. size: as of `run`."""
        pause_s = 0.0 if size <= INLINE_SIZE else _PAUSE_S
        return await self.run(size, lambda: _pieces(answer(), pause_s))

    async def run_apart(
        self, kind: Kind, size: int, work: Callable[[], T], threads: Executor | None = None
    ) -> T:
        """Runs work in a thread, of the loop's own threads without others. Raises as `run`."""
        turn = await self._taking.enter(kind, size, self._tenant, self._is_batch)

        def done(job: "asyncio.Future[T]") -> None:
            if not job.cancelled():
                job.exception()  # known, whether or not somebody still waits for it
            self._taking.leave(turn)

        job = asyncio.get_running_loop().run_in_executor(threads, work)
        job.add_done_callback(done)
        # Nobody stops a thread: it uses its room until it ends, though its caller has left.
        return await asyncio.shield(job)

    async def listed(self, items: Iterable[S], make: Callable[[S], T | None]) -> list[T]:
        """Lists what is made of each item, without None. One list at a time is made of all
        callers', and between a few items other requests have their turn. Raises as `run`."""
        made: list[T] = []
        async with self.take("list"):
            for number, item in enumerate(items, 1):
                one = make(item)
                if one is not None:
                    made.append(one)
                if number % _LISTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        return made

    @asynccontextmanager
    async def take(self, kind: Kind) -> AsyncIterator[None]:
        """A turn of size 1, for what is inside. Raises as `run`."""
        turn = await self._taking.enter(kind, 1, self._tenant, self._is_batch)
        try:
            yield
        finally:
            self._taking.leave(turn)


def _pieces(answer: Any, pause_s: float) -> list[bytes]:
    pieces = []
    for piece in in_pieces(answer):
        pieces.append(piece)
        if pause_s:
            time.sleep(pause_s)
    return pieces
