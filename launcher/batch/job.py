"""One run of a batch: callers that send lines, and the files that take the answers."""

import asyncio
import ssl
import time
from dataclasses import dataclass, field

import httpx

from loraplex.adapters.common.authorities import trusted_context
from loraplex.launcher.batch.progress import Progress
from loraplex.launcher.refusals import error_text, retry_after_s
from loraplex.launcher.router_client import bearer
from loraplex.router.http.client import http_client
from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.gate import Gate
from loraplex.router.lines.index import BatchInput
from loraplex.router.lines.journal import Journal
from loraplex.router.lines.lines import BadLine, BatchRequest
from loraplex.router.lines.order import AdapterWindow, send_order
from loraplex.router.lines.pace import BUSY, TOO_LONG, SendPace, after_failure, pause_s
from loraplex.router.lines.records import BatchFault, Outcome, record_id, record_of, response_of

_CHECK_S = 30.0  # for the server's first answer


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Bounds of a run.

    concurrency: lines in flight. adapters: those with lines in flight. retries: of a line.
    """

    concurrency: int
    adapters: int
    retries: int
    timeout_s: float
    api_key: str = field(default="", repr=False)


class BatchJob:
    """Runs beside the server's processes, or alone. `server_ready` lets it begin."""

    def __init__(
        self, plan: BatchPlan, source: BatchInput, journal: Journal, progress: Progress
    ) -> None:
        self._plan = plan
        self._source = source
        self._journal = journal
        self._progress = progress
        self._window = AdapterWindow(plan.adapters)
        self._places = map(int, send_order(source.groups, journal.answered))
        self._gate = Gate(SendPace(plan.concurrency))
        self._attempts = _LineAttempts(self._gate, plan.retries, progress)
        self._turn = asyncio.Lock()
        self._url = ""
        self._sending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._over.set()
        self.failure: Exception | None = None

    def server_ready(self, url: str) -> None:
        self._url = url
        self._gate.wake()

    async def run(self) -> None:
        """Run until every line has an answer, until `stop`, or until `failure` is set."""
        self._over.clear()
        try:
            if await self._gate.until(lambda: self._url != ""):
                self._sending = asyncio.create_task(self._send_all())
                await asyncio.wait([self._sending])
        finally:
            self._over.set()

    async def stop(self) -> None:
        """Sends no more, and waits for what is in flight."""
        self._gate.stop()
        await self._over.wait()

    def kill(self) -> None:
        """Leave lines in flight without an answer."""
        self._gate.stop()
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        count = min(self._plan.concurrency, self._progress.open)
        self._progress.begin(time.monotonic())
        ticker = asyncio.create_task(self._tick())
        trusted = trusted_context()
        try:
            async with self._client(trusted) as http:
                await _check_server(http)
            await asyncio.gather(*(self._caller(trusted) for _ in range(count)))
        except Exception as error:
            self.failure = error
        finally:
            ticker.cancel()

    def _client(self, trusted: ssl.SSLContext) -> httpx.AsyncClient:
        """A client for one caller: httpx looks through all of a client's connections each time."""
        headers = bearer(self._plan.api_key)
        return http_client(self._plan.timeout_s, self._url, headers, trusted=trusted)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._progress.interval_s)
            self._progress.show(time.monotonic())

    async def _caller(self, trusted: ssl.SSLContext) -> None:
        """Sends lines, one after the other. Another caller's failure stops this one
        after its line.
        """
        try:
            async with self._client(trusted) as http:
                while (place := await self._next()) is not None:
                    try:
                        await self._answer(http, place)
                    finally:
                        self._window.end(self._source.groups[place])
                        self._gate.wake()
        except Exception as error:
            self.failure = self.failure or error
            self._gate.stop()

    async def _next(self) -> int | None:
        """The next line's place. An adapter's first line may have to wait for another's last."""
        async with self._turn:
            place: int | None = None if self._gate.is_stopped else next(self._places, None)
            if place is None:
                return None
            group = self._source.groups[place]
            if not await self._gate.until(lambda: self._window.has_room(group)):
                return None
            self._window.begin(group)
            return place

    async def _answer(self, http: httpx.AsyncClient, place: int) -> None:
        said = self._source.read(place)
        outcome: Outcome | None
        if isinstance(said, BadLine):
            outcome = BatchFault(said.code, said.message)
        else:
            outcome = await self._attempts.answer(http, said)
        if outcome is None:
            return
        name = record_id(place + 1, self._source.mark(place))
        record = record_of(name, said.custom_id, outcome)
        self._journal.append(place, record)
        self._progress.count("" if record.is_success else record.kind)


async def _check_server(http: httpx.AsyncClient) -> None:
    """Checks that the server answers and takes the key. Not all servers list models.

    Raises BatchError, before every line fails in the same way.
    """
    try:
        answer = await http.get("/v1/models", timeout=_CHECK_S)
    except httpx.RequestError as error:
        why = str(error) or type(error).__name__
        raise BatchError(f"no server answers at {http.base_url} ({why})") from error
    if answer.status_code == 401:
        raise BatchError(f"{http.base_url} refuses the key: {error_text(answer.content)}")


@dataclass(frozen=True, slots=True)
class _Failure:
    """A line's attempt without a good answer. Another attempt may help. outcome: if it is the last.
    status: None = there was no answer.
    """

    outcome: Outcome
    why: str
    status: int | None = None
    asked_s: float | None = None


class _LineAttempts:
    """Attempts of all lines, which share a gate and a count of answers."""

    def __init__(self, gate: Gate, retries: int, progress: Progress) -> None:
        self._gate = gate
        self._retries = retries
        self._progress = progress
        self._answers = 0

    async def answer(self, http: httpx.AsyncClient, request: BatchRequest) -> Outcome | None:
        """Send a line until it has an answer; None if the batch stops first. Raises BatchError."""
        attempt, before = 0, self._answers
        while await self._gate.enter():
            attempt += 1
            got = await self._post(http, request)
            self._settle(got, attempt)
            if not isinstance(got, _Failure):
                return got
            further = self._answers > before
            verdict = after_failure(attempt, self._retries, got.status, further)
            if verdict == "give up":
                return got.outcome
            if verdict == "end":
                raise BatchError(f"{http.base_url} answers nobody any more: {got.why}")
            await self._gate.pause(pause_s(attempt, got.asked_s))
        return None

    def _settle(self, got: Outcome | _Failure, attempt: int) -> None:
        pace = self._gate.pace
        if not isinstance(got, _Failure):
            self._answers += 1
            self._progress.note = ""
            pace.answered()
        else:
            self._progress.note = f"waiting: {got.why}"
            if got.status is None:
                pace.lost()
            else:
                pace.busy(time.monotonic(), pause_s(attempt, got.asked_s))
        self._gate.wake()

    async def _post(self, http: httpx.AsyncClient, request: BatchRequest) -> Outcome | _Failure:
        headers = {"content-type": "application/json"}
        try:
            answer = await http.post(request.path, content=request.body, headers=headers)
        except httpx.ReadTimeout:
            why = "no answer in time (--timeout-s)"
            return _Failure(BatchFault("timeout", why), why, TOO_LONG)
        except httpx.RequestError as error:
            why = f"{type(error).__name__} {error}".strip()
            return _Failure(BatchFault("connection_failed", f"no answer came: {why}"), why)
        outcome = response_of(
            answer.status_code, answer.headers.get("x-request-id"), answer.content
        )
        if answer.status_code not in BUSY:
            return outcome
        asked = retry_after_s(answer.headers.get("retry-after", ""), time.time())
        why = f"{answer.status_code} {error_text(answer.content)}"
        return _Failure(outcome, why, answer.status_code, asked)
