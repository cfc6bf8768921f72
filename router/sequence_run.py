"""One sequence from the queue to its last token, over as many workers as it takes. Tokens only.

Every run ends in exactly one way: an event with `finish`, or a failure in its inbox. No token is
forwarded twice, none is left out.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from adapters.errors import AdapterError
from router.failures import DeadlinePassed, ReaderTooSlow, SequenceFailed
from router.fleet import Fleet
from router.metrics import RouterMetrics, Start
from router.placement import Reason
from router.served import ServedAdapter, changed, has_changed
from router.waiting import Waiting
from router.worker_session import Credit, WorkerLost, WorkerSession
from server.protocol import ErrorCode, GenerateRequest, TokenEvent

MAX_RETRIES = 2
RESUME_TIMEOUT_S = 60.0
_RESUME_PRIORITY = 1 << 16
_BUSY_DELAY_S = 0.05
_LONGEST_BUSY_DELAY_S = 1.0
# Of a sequence that waits: a list's entry and a Python int.
_BYTES_A_TOKEN = 36


class Inbox:
    """Token events of one request's sequences, for its one reader. Bounded in events."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._events: deque[tuple[int, TokenEvent]] = deque()
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, slot: int, event: TokenEvent) -> None:
        if self._failure is not None:
            return
        if len(self._events) >= self._max_events:
            self._events.clear()
            self.fail(ReaderTooSlow())
            return
        self._events.append((slot, event))
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The first failure ends the request; events that came before it are still read."""
        if self._failure is None:
            self._failure = error
            self._wake()

    async def take(self) -> list[tuple[int, TokenEvent]]:
        """All events that are there, at least one. Raises the failure after the last of them."""
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events = list(self._events)
        self._events.clear()
        return events

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RunContext(msgspec.Struct, frozen=True):
    """What the sequences of one request share. deadline: on the event loop's clock.

    forget_adapter: to be called when a worker does not admit what the catalog says.
    tenant: whose request it is; "" = nobody's.
    """

    fleet: Fleet
    inbox: Inbox
    metrics: RouterMetrics
    adapter: ServedAdapter | None
    forget_adapter: Callable[[], None]
    deadline: float
    tenant: str = ""


class SequenceRun:
    """`request`: attempt 0, nothing accepted. `slot` names the run in the inbox."""

    def __init__(self, context: RunContext, slot: int, request: GenerateRequest) -> None:
        self._context = context
        self._slot = slot
        self._request = request
        self._accepted: list[int] = []
        self._attempt = 0
        self._retries = 0
        self._session: WorkerSession | None = None
        self._reason: Reason | None = None
        self._done = False
        self._placing = self._start_placing(0.0)

    @property
    def start(self) -> Start:
        """How the worker that it was placed on last had its adapter."""
        if self._request.adapter is None:
            return "base"
        return "warm" if self._reason == "resident" else "cold"

    def stop(self) -> None:
        """Ends the run wherever it is; nothing more comes from it."""
        self._done = True
        self._placing.cancel()
        if self._session is not None:
            with contextlib.suppress(WorkerLost):  # then the sequence ended with the connection
                self._session.abandon(self._request.request_id, self._attempt, self._request.choice)
            self._session = None

    # Placing

    def _start_placing(self, delay_s: float) -> asyncio.Task[None]:
        task = asyncio.create_task(self._place(delay_s))
        task.add_done_callback(self._end_placing)
        return task

    def _end_placing(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    async def _place(self, delay_s: float) -> None:
        """Brings the current attempt to a worker. What it raises is the request's failure."""
        await asyncio.sleep(delay_s)
        try:
            await self._place_once()
        except WorkerLost as error:
            self._retry("engine_lost", str(error))
        except DeadlinePassed as error:
            raise self._late() from error

    async def _place_once(self) -> None:
        context = self._context
        loop = asyncio.get_running_loop()
        started = loop.time()
        credit, reason = await context.fleet.acquire(self._entry(started))
        try:
            self._reason = reason
            context.metrics.placed(reason, loop.time() - started)
            await self._admit(credit)
            self._submit(credit, context.deadline - loop.time())
        finally:
            credit.release()

    def _entry(self, now: float) -> Waiting[None]:
        request = self._request
        deadline, priority = self._context.deadline, request.priority
        if self._attempt:  # its client has waited already: ahead of all who have not begun
            deadline = min(deadline, now + RESUME_TIMEOUT_S)
            priority += _RESUME_PRIORITY
        return Waiting(
            payload=None,
            flow=request.adapter,
            cost=len(request.prompt_ids) + request.sampling.max_tokens,
            nbytes=_BYTES_A_TOKEN * len(request.prompt_ids),
            priority=priority,
            deadline=deadline,
        )

    async def _admit(self, credit: Credit) -> None:
        adapter = self._context.adapter
        if adapter is None:
            return
        try:
            await credit.session.admit(adapter.origin, adapter.token, adapter.digest)
        except AdapterError as error:
            self._context.forget_adapter()
            if has_changed(error):
                raise changed() from error
            raise

    def _submit(self, credit: Credit, seconds_left: float) -> None:
        request = msgspec.structs.replace(
            self._request,
            attempt=self._attempt,
            accepted_ids=self._accepted,
            deadline_s=max(0.0, seconds_left),
        )
        credit.submit(request, partial(self._receive, self._attempt))
        self._session = credit.session

    # Receiving: called by the connection's reader, once an event

    def _receive(self, attempt: int, event: TokenEvent) -> None:
        if self._done or attempt != self._attempt:
            return
        if event.finish in ("error", "abort"):
            if event.error == "adapter_unavailable" and self._session and self._request.adapter:
                self._session.forget(self._request.adapter)
            self._session = None
            self._retry(event.error or "engine_lost", event.message or "the worker gave up")
            return
        self._accepted += event.token_ids
        if event.finish is not None:
            self._done = True
            self._session = None
        self._context.inbox.put(self._slot, event)
        if self._context.inbox.failed:
            self.stop()

    def _retry(self, code: ErrorCode, message: str) -> None:
        """Goes on with another attempt if the error allows one; else fails."""
        busy = code in ("overloaded", "draining")
        if not busy and (code not in _RESUMABLE or self._retries >= MAX_RETRIES):
            self._fail(SequenceFailed(code, message))
            return
        if self._accepted and len(self._accepted) >= self._request.sampling.max_tokens:
            self._finish_full()
            return
        self._retries += not busy
        self._attempt += 1
        self._context.metrics.resumed(code)
        delay = min(_BUSY_DELAY_S * 2 ** min(self._attempt, 8), _LONGEST_BUSY_DELAY_S)
        self._placing = self._start_placing(delay * random.uniform(0.5, 1.5) if busy else 0.0)

    def _finish_full(self) -> None:
        """All tokens came, only the word that they were all was lost."""
        self._done = True
        request = self._request
        event = TokenEvent(
            *(request.request_id, self._attempt, request.choice, len(self._accepted), ()),
            finish="length",
        )
        self._context.inbox.put(self._slot, event)

    def _late(self) -> Exception:
        now = asyncio.get_running_loop().time()
        if self._attempt and now < self._context.deadline:
            return SequenceFailed("engine_lost", "no worker came back to go on with this request")
        return DeadlinePassed()

    def _fail(self, error: BaseException) -> None:
        self._done = True
        self._context.inbox.fail(error)


_RESUMABLE: frozenset[ErrorCode] = frozenset({"engine_lost", "adapter_unavailable"})
