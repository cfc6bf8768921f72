"""Load on any server with one of OpenAI's APIs or LoRAX's, by a lean HTTP/1.1 client for many token
streams, and the answers of its clients.

A request has a connection, an event a time. Times are seconds of `time.monotonic`, which all
processes of a machine share. Servers differ: only what is needed is read, and what cannot be is
this one answer's fault.
"""

import asyncio
import contextlib
import re
import ssl
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, cast
from urllib.parse import SplitResult, urlsplit

import httptools
import httpx
import msgspec
import uvloop
from msgspec import Meta

from loraplex.adapters.common.authorities import trusted_context
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.target import Target, body_of
from loraplex.launcher.bench.load.workload import Call, Workload
from loraplex.launcher.bench.report import Outcome
from loraplex.launcher.refusals import UNREADABLE, error_text, one_line, retry_after_s
from loraplex.router.http.client import http_client

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_Count = Annotated[int, Meta(ge=0)] | None

START_HEADER = b"x-loraplex-start"
# Kept of a body that has no events: enough for its message.
_HEAD_BYTES = 16 << 10

# Processes import and draw before the first call leaves.
_START_DELAY_S = 3.0
_LIST_S = 10.0  # of models


class EventReader:
    """Server-sent events of one stream, out of bytes as they come, by the WHATWG's rules. Names and
    ids of events, and comments, mean nothing to a benchmark."""

    def __init__(self) -> None:
        self._rest = b""  # of a line without its end
        self._data: list[bytes] = []  # of an event without its end
        self._after_cr = False
        self._is_first_line = True

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of each event that this piece completes; one without data is none."""
        if not piece:
            return []
        if self._after_cr:  # its line has ended already
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        return [event for event in map(self._line, lines) if event]

    def _line(self, line: bytes) -> bytes:
        """Returns the data of the event that the line ends, else nothing."""
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            event, self._data = b"\n".join(self._data), []
            return event
        name, _, value = line.partition(b":")  # a comment has no name
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return b""


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """A choice in a streamed answer. text: of completions. delta: of a chat."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    """LoRAX's usage."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = msgspec.field(default=None, name="generated_tokens")
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event of a streamed answer. choices, usage: OpenAI's. token, generated_text, details:
    LoRAX's; the text is of the last event alone. object, message: of an error that is not within
    `error`.
    """

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    token: dict[str, Any] | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: Any = None
    object: Any = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamedAnswer:
    """Content of the events of one answer.

    has_ended: the server said that this is all. fault: what kind of failure, and its text.
    prompt_tokens, output_tokens: as the server counted them. filled: it ended at the length that
    was asked for.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self.fault: tuple[str, str] | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.filled = False
        self._text_s: list[float] = []
        self._silent_s: list[float] = []

    @property
    def token_s(self) -> list[float]:
        """When events with text came; of an answer without text, all events of choices."""
        return self._text_s or self._silent_s

    @property
    def has_text(self) -> bool:
        return bool(self._text_s)

    def take(self, data: bytes, now: float) -> None:
        """Takes the next event. now: seconds."""
        if data.strip() == b"[DONE]":
            self.has_ended = True
            return
        try:
            event = _decode(data)
        except UNREADABLE as error:
            self._fail("malformed event", f"{one_line(data)} ({error})")
            return
        if event.error is not None or event.object == "error":
            self._fail("error event", error_text(data))
            return
        self._count(event)
        if event.token is not None or any(map(_has_text, event.choices or ())):
            self._text_s.append(now)
        elif event.choices:
            self._silent_s.append(now)

    def _count(self, event: _Event) -> None:
        said: _Usage | _Details | None = event.usage or event.details
        if said is not None:
            self.prompt_tokens = _or(said.prompt_tokens, self.prompt_tokens)
            self.output_tokens = _or(said.completion_tokens, self.output_tokens)
        self.has_ended |= event.generated_text is not None
        reasons = [choice.finish_reason for choice in event.choices or ()]
        reasons += [event.details.finish_reason] if event.details else []
        self.filled |= "length" in reasons

    def _fail(self, kind: str, text: str) -> None:
        self.fault = self.fault or (kind, text)


def _or(said: int | None, before: int | None) -> int | None:
    return before if said is None else said


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta or _Delta()
    return bool(choice.text or delta.content or delta.reasoning_content or delta.reasoning)


class StreamProtocol(asyncio.Protocol):
    """Sends one POST and notes when each server-sent event arrives.

    start: what the server said of the adapter. head: how the body begins. began: set with the
    first token, or the end.
    """

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = asyncio.Event()
        self.status = 0
        self.retry_after_s: float | None = None
        self.start: str | None = None
        self.answer = StreamedAnswer()
        self.head = b""
        self._events = EventReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.finish(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == START_HEADER:
            self.start = value.decode("latin-1")
        elif name.lower() == b"retry-after":
            self.retry_after_s = retry_after_s(value.decode("latin-1"), time.time())

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        now = time.monotonic()
        if len(self.head) < _HEAD_BYTES:
            self.head += body[: _HEAD_BYTES - len(self.head)]
        if self.status != 200:
            return
        for event in self._events.feed(body):
            self.answer.take(event, now)
        if self.answer.has_text:
            self.began.set()

    def on_message_complete(self) -> None:
        self.finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends an answer without a length; an early close is an error."""
        is_said = self.answer.has_ended or self.answer.fault or self.status not in (0, 200)
        if exc is None and not is_said:
            exc = ConnectionResetError("closed before the answer ended")
        self.finish(exc)

    def finish(self, error: Exception | None) -> None:
        self.began.set()
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        self.transport.close()

    def abandon(self) -> None:
        """Leaves before the end; `done` fails, and nobody needs to look."""
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.transport.close()


@cache
def _tls() -> ssl.SSLContext:
    """Makes one context for all connections: that takes longer than a token."""
    return trusted_context()


def request_bytes(parts: SplitResult, body: bytes, headers: dict[str, str]) -> bytes:
    """A POST of JSON, whole. parts: of the URL."""
    lines = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    head = f"POST {parts.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return head.encode() + b"\r\n" + body


async def open_stream(url: str, body: bytes, headers: dict[str, str]) -> StreamProtocol:
    """Posts, and reads from then on; `done` ends with the answer. Raises OSError."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    secure = _tls() if parts.scheme == "https" else None
    request = request_bytes(parts, body, headers)
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: StreamProtocol(request),
            parts.hostname,
            parts.port or (443 if secure else 80),
            ssl=secure,
        )
    except UnicodeError:
        raise OSError(f"{parts.hostname[:80]!r} is no name of a host") from None
    return protocol


async def post_stream(
    url: str, body: bytes, headers: dict[str, str], timeout_s: float
) -> StreamProtocol:
    """Posts and reads to the end. Raises OSError, TimeoutError or HttpParserError."""
    try:
        async with asyncio.timeout(timeout_s):
            protocol = await open_stream(url, body, headers)
            await protocol.done
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no end within {timeout_s:g} s") from None
    return protocol


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One process's part of a load. Every `parts`-th call, from `part` on, for one process.
    concurrency: callers of a closed loop. start_s: on the monotonic clock; None = at once.
    """

    target: Target
    workload: Workload
    concurrency: int | None = None
    part: int = 0
    parts: int = 1
    start_s: float | None = None


class _Model(msgspec.Struct):
    """A model that a server lists. parent: an adapter's base; None = it is one itself."""

    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def with_base_model(target: Target) -> Target:
    """Adds the base's name as the server lists it; `base` where no list says. LoRAX needs none."""
    if target.base_model or target.api == "lorax":
        return target
    name = "base"
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError):
        async with http_client(_LIST_S) as http:
            answer = await http.get(f"{target.url}/v1/models", headers=target.headers)
        listed = msgspec.json.decode(answer.content, type=_Models).data
        name = next((model.id for model in listed if model.parent is None), name)
    return replace(target, base_model=name)


def settle(outcome: Outcome, got: StreamProtocol) -> None:
    """Copies what an ended answer contained."""
    answer = got.answer
    outcome.start = got.start
    outcome.token_s = answer.token_s
    if got.status != 200:
        outcome.retry_after_s = got.retry_after_s
        outcome.error, outcome.message = str(got.status), error_text(got.head)
    elif answer.fault is not None:
        outcome.error, outcome.message = answer.fault
    elif not answer.token_s:
        outcome.error, outcome.message = "no tokens", one_line(got.head)
    if answer.prompt_tokens is not None:
        outcome.prompt_tokens = answer.prompt_tokens
    outcome.output_tokens = len(answer.token_s)
    outcome.counted_by_events = answer.output_tokens is None
    if answer.output_tokens is not None:
        outcome.output_tokens = answer.output_tokens
    outcome.short = outcome.output_tokens < outcome.asked_tokens and not answer.filled


async def send(target: Target, call: Call, outcome: Outcome) -> None:
    outcome.sent_s = time.monotonic()
    outcome.prompt_tokens, outcome.asked_tokens = len(call.prompt), call.output_tokens
    try:
        body = body_of(target, call)
        settle(outcome, await post_stream(target.address, body, target.headers, target.timeout_s))
    except (OSError, httptools.HttpParserError) as error:
        outcome.error, outcome.message = type(error).__name__, one_line(str(error).encode())
    outcome.end_s = time.monotonic()


async def run_job(job: LoadPart) -> list[Outcome]:
    """Sends one process's calls: each at its time, or by `concurrency` callers, back to back."""
    seen: set[str | None] = set()
    share: list[tuple[Call, Outcome]] = []
    for call in job.workload.calls():
        if call.number % job.parts == job.part:
            share.append((call, Outcome(call.adapter, call.adapter not in seen, 0.0)))
        seen.add(call.adapter)
    pending = iter(share)
    start = time.monotonic() if job.start_s is None else job.start_s

    async def at(when: float, call: Call, outcome: Outcome) -> None:
        await asyncio.sleep(max(0.0, when - time.monotonic()))
        await send(job.target, call, outcome)

    async def caller() -> None:
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        for call, outcome in pending:
            await send(job.target, call, outcome)

    async with asyncio.TaskGroup() as group:
        if job.concurrency is None:
            for call, outcome in pending:
                group.create_task(at(start + call.at_s, call, outcome))
        else:
            for _ in range(job.concurrency):
                group.create_task(caller())
    return [outcome for _, outcome in share]


async def run_load(
    target: Target, workload: Workload, concurrency: int | None = None, processes: int = 1
) -> list[Outcome]:
    """Sends a workload to a server and returns the outcome of each request. processes: to send
    from, where one is too slow to keep up; at most `concurrency`.
    """
    if None in workload.adapters:
        target = await with_base_model(target)
    if processes == 1:
        return await run_job(LoadPart(target, workload, concurrency))
    start = time.monotonic() + _START_DELAY_S
    jobs = [
        LoadPart(target, workload, _part(concurrency, i, processes), i, processes, start)
        for i in range(processes)
    ]
    parts = await asyncio.gather(*map(_in_process, jobs))
    return [outcome for part in parts for outcome in part]


def _part(total: int | None, index: int, parts: int) -> int | None:
    return None if total is None else total // parts + (index < total % parts)


async def _in_process(job: LoadPart) -> list[Outcome]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loraplex.launcher.bench.load.serve",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate(msgspec.msgpack.encode(job))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(f"a process of the load left with code {process.returncode}")
    return msgspec.msgpack.decode(output, type=list[Outcome])


def main() -> None:
    """Runs one process of a load: a `LoadPart` on stdin, its outcomes on stdout, as msgpack."""
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LoadPart)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(run_job(job))
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))


if __name__ == "__main__":
    main()
