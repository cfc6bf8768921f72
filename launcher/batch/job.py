"""One run of `loraplex batch`: a file's open lines become batches of a server, which runs them."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loraplex.launcher.refusals import error_text
from loraplex.launcher.router_client import bearer
from loraplex.router.api.files_and_batches import BatchObject, FileObject, RequestCounts
from loraplex.router.files.store import read_if_there, write_whole
from loraplex.router.http.client import http_client
from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.line_files import BatchInput, Journal
from loraplex.router.lines.lines import BadLine, BatchRequest
from loraplex.router.lines.order import send_order
from loraplex.router.lines.pace import BUSY
from loraplex.router.lines.records import (
    NOT_RUN,
    BatchFault,
    BatchRecord,
    line_of,
    record_id,
    record_of,
)

# The most that one batch takes.
PART_LINES = 50_000
_PART_BYTES = 64 << 20
_WINDOW = "14d"  # the longest that a server takes
_POLL_S = 0.5
_PATIENCE_S = 300.0  # for a server that is busy or away
_PHASE_S = 120.0  # of one exchange with the server
_NO_ANSWER = frozenset(fault.code for fault in NOT_RUN.values())
_LOG_S = 10.0

_read_batch = msgspec.json.Decoder(BatchObject).decode
_read_file = msgspec.json.Decoder(FileObject).decode
_read_record = msgspec.json.Decoder(BatchRecord).decode


def say(text: str) -> None:
    print(f"loraplex: {text}", file=sys.stderr, flush=True)


def parts(source: BatchInput, answered: bytearray) -> Iterator[tuple[str, list[bytes]]]:
    """Routes with open lines, adapter by adapter, as many at once as a batch takes. answered: as of
    `send_order`. Raises BatchError."""
    routes: dict[str, list[int]] = {}
    for place in map(int, send_order(source.groups, answered)):
        said = source.read(place)
        if isinstance(said, BatchRequest):
            routes.setdefault(said.path, []).append(place)
    for route, places in routes.items():
        part: list[bytes] = []
        nbytes = 0
        for line in map(source.content, places):
            if part and (len(part) == PART_LINES or nbytes + len(line) > _PART_BYTES):
                yield route, part
                part, nbytes = [], 0
            part.append(line)
            nbytes += len(line) + 1
        yield route, part


class BatchJob:
    """Runs beside the server's processes, or alone. `server_ready` lets it begin. failure: why it
    ended before every line had an answer.
    """

    def __init__(
        self, source: BatchInput, journal: Journal, running: Path, api_key: str = ""
    ) -> None:
        """running: file of the id of the batch that a server runs for this command."""
        self._source = source
        self._journal = journal
        self._running = running
        self._api_key = api_key
        # The first of lines that are alike: the others have a custom_id that is taken.
        self._places = {source.mark(place): place for place in reversed(range(source.lines))}
        self._counts = RequestCounts()
        self._note = ""
        self._url = ""
        self._is_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.failure: Exception | None = None

    def server_ready(self, url: str) -> None:
        self._url = url
        self._is_ready.set()

    async def run(self) -> None:
        """Runs until every line has an answer, until `stop`, or until `failure` is set."""
        self._task = asyncio.create_task(self._run())
        await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Cancels what the server runs, and fetches the answers that are there."""
        self._stopping.set()
        if not self._is_ready.is_set():
            self.kill()
        if self._task is not None:
            await asyncio.wait([self._task])

    def kill(self) -> None:
        """Leaves the server's batches as they are: the same command goes on with them."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        await self._is_ready.wait()
        ticker = asyncio.create_task(self._tick())
        try:
            async with http_client(_PHASE_S, self._url, bearer(self._api_key)) as http:
                await _check_server(http)
                await self._run_lines(http)
        except Exception as error:
            self.failure = error
        finally:
            ticker.cancel()

    async def _tick(self) -> None:
        total = self._source.requests
        while True:
            await asyncio.sleep(_LOG_S)
            failed = self._journal.failed + self._counts.failed
            done = self._journal.skipped + self._counts.completed + self._counts.failed
            note = self._note and f", {self._note}"
            say(f"{done:,} of {total:,} lines, {failed:,} failed{note}")

    async def _run_lines(self, http: httpx.AsyncClient) -> None:
        """Follows the batch of an earlier run, then makes others. Raises BatchError."""
        earlier = (read_if_there(self._running) or b"").decode()
        if earlier:
            await self._follow(http, earlier)
        self._answer_bad_lines()
        for route, lines in parts(self._source, self._journal.answered):
            if self._stopping.is_set():
                return
            await self._follow(http, await self._start(http, route, lines))

    def _answer_bad_lines(self) -> None:
        for place in map(int, send_order(self._source.groups, self._journal.answered)):
            if self._source.groups[place] >= 0:
                return
            said = self._source.read(place)
            assert isinstance(said, BadLine)
            fault = BatchFault(said.code, said.message)
            self._journal.append(place, record_of(self._name(place), said.custom_id, fault))

    async def _start(self, http: httpx.AsyncClient, route: str, lines: list[bytes]) -> str:
        """Makes a batch of lines. Returns its id. Raises BatchError."""
        content = b"".join(line + b"\n" for line in lines)
        form = {"file": ("lines.jsonl", content)}
        answer = await self._ask(http, "POST", "/v1/files", files=form, data={"purpose": "batch"})
        file = _read_file(_checked(http, answer))
        body = {"input_file_id": file.id, "endpoint": route, "completion_window": _WINDOW}
        answer = await self._ask(http, "POST", "/v1/batches", json=body)
        batch = _read_batch(_checked(http, answer))
        write_whole(self._running, batch.id.encode())
        return batch.id

    async def _follow(self, http: httpx.AsyncClient, batch_id: str) -> None:
        """Waits for a batch's end, and takes its answers. Raises BatchError."""
        path = f"/v1/batches/{batch_id}"
        is_cancelled = False
        while True:
            answer = await self._ask(http, "GET", path)
            if answer.status_code == 404:  # of another server, or forgotten: lines are asked again
                return
            batch = _read_batch(_checked(http, answer))
            self._counts = batch.request_counts
            if batch.status in ("completed", *NOT_RUN):
                break
            if self._stopping.is_set() and not is_cancelled:
                await self._ask(http, "POST", f"{path}/cancel")
                is_cancelled = True
            await self._pause()
        await self._take(http, batch)

    async def _take(self, http: httpx.AsyncClient, batch: BatchObject) -> None:
        """Writes the answers of a batch that is over, and deletes its files. Raises BatchError."""
        answers = list(filter(None, (batch.output_file_id, batch.error_file_id)))
        for file_id in answers:
            async for line in _lines(http, f"/v1/files/{file_id}/content"):
                self._append(_read_record(line))
        self._counts = RequestCounts()
        self._running.unlink()
        for file_id in (batch.input_file_id, *answers):
            await self._ask(http, "DELETE", f"/v1/files/{file_id}")
        if batch.status == "failed":
            found = batch.errors.data if batch.errors else []
            raise BatchError(f"{batch.id} failed: {'; '.join(one.message for one in found)}")

    def _append(self, record: BatchRecord) -> None:
        """Writes a record under its line's number in this input. Raises BatchError."""
        line = line_of(record.id)
        if line is None:
            raise BatchError(f"the server's answer {record.id[:80]!r} says no line")
        has_answer = record.error is None or record.error.code not in _NO_ANSWER
        place = self._places.get(line[1])
        if has_answer and place is not None and not self._journal.answered[place]:
            self._journal.append(place, msgspec.structs.replace(record, id=self._name(place)))

    def _name(self, place: int) -> str:
        return record_id(place + 1, self._source.mark(place))

    async def _ask(
        self, http: httpx.AsyncClient, method: str, path: str, **more: Any
    ) -> httpx.Response:
        """An answer of the server, as soon as it is there and not busy. Raises BatchError."""
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                answer = await http.request(method, path, **more)
                why = f"{answer.status_code} {error_text(answer.content)}"
                if answer.status_code not in BUSY:
                    self._note = ""
                    return answer
            except httpx.RequestError as error:
                why = str(error) or type(error).__name__
            if time.monotonic() > give_up_at:
                raise BatchError(f"{http.base_url} answers nobody any more: {why}")
            self._note = f"waiting: {why}"
            await self._pause()

    async def _pause(self) -> None:
        if self._stopping.is_set():
            await asyncio.sleep(_POLL_S)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _POLL_S)


def _checked(http: httpx.AsyncClient, answer: httpx.Response) -> bytes:
    """The body of an answer that is a success. Raises BatchError."""
    if not answer.is_success:
        raise BatchError(f"{http.base_url} runs no batch: {error_text(answer.content)}")
    return answer.content


async def _lines(http: httpx.AsyncClient, path: str) -> AsyncIterator[bytes]:
    """Lines of a file on the server; none where it has gone, so that its lines are asked again.
    Raises BatchError, also where the file breaks off."""
    rest = b""
    try:
        async with http.stream("GET", path) as answer:
            if answer.status_code == 404:
                return
            if not answer.is_success:
                await answer.aread()
                _checked(http, answer)
            async for piece in answer.aiter_bytes():
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield line
    except httpx.RequestError as error:
        raise BatchError(f"{http.base_url}: answers broke off ({error})") from error


async def _check_server(http: httpx.AsyncClient) -> None:
    """Checks the server and the key, before any line is sent. Raises BatchError."""
    try:
        answer = await http.get("/v1/models")
    except httpx.RequestError as error:
        why = str(error) or type(error).__name__
        raise BatchError(f"no server answers at {http.base_url} ({why})") from error
    if answer.status_code == 401:
        raise BatchError(f"{http.base_url} refuses the key: {error_text(answer.content)}")
