"""One run of a batch: callers that send lines, and the files that take the answers."""

import asyncio
import ssl
import time
from dataclasses import dataclass, field

import httpx

from loraplex.adapters.common.authorities import trusted_context
from loraplex.launcher.batch.attempts import LineAttempts
from loraplex.launcher.batch.progress import Progress
from loraplex.launcher.refusals import error_text
from loraplex.launcher.router_client import bearer
from loraplex.router.http.client import http_client
from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.gate import Gate
from loraplex.router.lines.index import BatchInput
from loraplex.router.lines.journal import Journal
from loraplex.router.lines.lines import BadLine
from loraplex.router.lines.order import AdapterWindow, send_order
from loraplex.router.lines.pace import SendPace
from loraplex.router.lines.records import BatchFault, Outcome, record_id, record_of

_CHECK_S = 30.0  # for the server's first answer


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """concurrency: lines in flight. adapters: that have lines in flight. retries: of a line."""

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
        self._attempts = LineAttempts(self._gate, plan.retries, progress)
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
        """Until every line has an answer, or `stop`, or what `failure` says."""
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
        """What is in flight is left without an answer."""
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
        """One a caller: for each request httpx looks through all connections of a client."""
        headers = bearer(self._plan.api_key)
        return http_client(self._plan.timeout_s, self._url, headers, trusted=trusted)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._progress.interval_s)
            self._progress.show(time.monotonic())

    async def _caller(self, trusted: ssl.SSLContext) -> None:
        """Another caller's failure stops this one after its line."""
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
    """Raises BatchError, before every line fails in the same way. Not all servers list models."""
    try:
        answer = await http.get("/v1/models", timeout=_CHECK_S)
    except httpx.RequestError as error:
        why = str(error) or type(error).__name__
        raise BatchError(f"no server answers at {http.base_url} ({why})") from error
    if answer.status_code == 401:
        raise BatchError(f"{http.base_url} refuses the key: {error_text(answer.content)}")
