"""One sequence from the queue to its last token, over as many workers as it takes. Tokens only.

Every run ends in exactly one way: an event with `finish`, or a failure in its inbox. No token is
forwarded twice, none is left out.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.router.failures import ReaderTooSlow, RequestQuarantined, SequenceFailed
from loraplex.router.names.served import ServedAdapter, changed, has_changed, home_key
from loraplex.router.policy.placement.attempts import Attempts, Quarantine, RetryBudget
from loraplex.router.policy.placement.placement import PlacementRequest
from loraplex.router.policy.placement.prefixes import prefix_keys, session_key
from loraplex.router.policy.queue.queue_limits import Promise
from loraplex.router.policy.queue.waiting import Bill, Waiting
from loraplex.router.telemetry.observer import SequenceObserver
from loraplex.router.workers.fleet import Fleet
from loraplex.router.workers.session import Credit, WorkerLost, WorkerSession
from loraplex.server.protocol import (
    ErrorCode,
    Evidence,
    GenerateRequest,
    PictureSpan,
    SamplingParams,
    TokenEvent,
    VectorParams,
    encode,
)

# What CPython takes for an event with one token, for each further token, and for an alternative.
_EVENT_BYTES = 512
_TOKEN_BYTES = 36
_ALTERNATIVE_BYTES = 120
# That a reader gets at once: of a thousand choices an event each comes with every step.
_AT_ONCE = 32
# A reader with such a part of what it may have unread is behind.
_BEHIND = 1 / 4


# The slot of a sequence, its event, and when that came.
Arrival = tuple[int, TokenEvent, float]

logger = logging.getLogger(__name__)

# Ahead of all who have not begun: its client has waited already.
_RESUME_PRIORITY = -(1 << 16)
_BUSY_DELAY_S = 0.05
_LONGEST_BUSY_DELAY_S = 1.0
# Suspects of several routers wait for the same worker: they had better not begin in the same step.
_APART_S = 0.5
# Of a sequence that waits: a list's entry and a Python int.
BYTES_A_TOKEN = 36


def memory_of(event: TokenEvent) -> int:
    """Estimates an event's bytes, but for the prompt's logprobs, which come once, if asked for."""
    nbytes = _EVENT_BYTES + _TOKEN_BYTES * len(event.token_ids)
    for token in event.logprobs or ():
        nbytes += _ALTERNATIVE_BYTES * (1 + len(token.top) + len(token.listed))
    return nbytes


class Inbox:
    """Token events of one request's sequences, for its one reader.

    Who falls further behind than `max_events` or `max_bytes` fails with ReaderTooSlow. A single
    event is always taken. gathers: of a reader that has use for the whole answer alone, events for
    which it is woken; the first one and an end wake it, too, and that share of the bytes.
    """

    def __init__(self, max_events: int, max_bytes: int, gathers: int = 1) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._gathers = gathers
        self._has_begun = False
        self._events: deque[Arrival] = deque()
        self._sizes: deque[int] = deque()  # of events, in bytes
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, slot: int, event: TokenEvent, at: float) -> None:
        """Takes in an event that came at a time, in seconds of `time.monotonic`."""
        if self._failure is not None:
            return
        nbytes = memory_of(event)
        self._nbytes += nbytes
        if self._events and self._is_full():
            self.rest()
            self.fail(ReaderTooSlow())
            return
        self._events.append((slot, event, at))
        self._sizes.append(nbytes)
        if event.finish is not None or not self._has_begun or self._is_due():
            self._has_begun = True
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Ends the request with a failure: the first counts, and earlier events are still read."""
        if self._failure is None:
            self._failure = error
            self._wake()

    async def take(self) -> list[Arrival]:
        """Takes events that are there: at least one, and not too many, so that other requests have
        their turn before the next. A reader that is behind takes all, so that it is not taken for
        too slow where the process is. Raises the failure after the last of them.
        """
        if len(self._events) > _AT_ONCE:
            await asyncio.sleep(0)
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_full(_BEHIND) or len(self._events) <= _AT_ONCE:
            return self.rest()
        self._nbytes -= sum(self._sizes.popleft() for _ in range(_AT_ONCE))
        return [self._events.popleft() for _ in range(_AT_ONCE)]

    def rest(self) -> list[Arrival]:
        """Takes all events that are there, if any."""
        events = list(self._events)
        self._events.clear()
        self._sizes.clear()
        self._nbytes = 0
        return events

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def _is_full(self, part: float = 1.0) -> bool:
        most = part * self._max_events
        return len(self._events) >= most or self._nbytes > part * self._max_bytes

    def _is_due(self) -> bool:
        most = self._gathers
        return len(self._events) >= most or self._nbytes * most > self._max_bytes

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Retries:
    """Limits of retries that a router's sequences share: none is tried for ever, nor all at once.

    probation: held by the one suspect that is being tried.
    """

    def __init__(self, budget: RetryBudget, quarantine: Quarantine) -> None:
        self.budget = budget
        self.quarantine = quarantine
        self.probation = asyncio.Lock()


def fingerprint(
    base: str,
    adapter: str | None,
    prompt_ids: list[int],
    pictures: Sequence[PictureSpan],
    sampling: SamplingParams,
) -> bytes:
    """Makes a key that is equal for requests that are the same to a worker, whatever their caller
    and seed. base: its digest. adapter: as of `GenerateRequest.acting`."""
    return hashlib.blake2b(
        encode((base, adapter, prompt_ids, pictures, sampling)),
        digest_size=16,
        person=b"quarantine",
    ).digest()


class RunContext(msgspec.Struct, frozen=True):
    """Values that the sequences of one request share. deadline: on the event loop's clock.

    forget_adapter: to be called when a worker does not admit what the catalog says. tenant: the
    request's; "" = nobody's. weight: the tenant's. salt: names the cached prefixes that may be
    used. drafts: as in GenerateRequest. room: in the queue, for all of the sequences. session:
    its sequences had better run where the last of this session ran; "" = none. fleet: the workers
    of its base, whose digest is `base_digest`. places: of pictures in the body, by their digests.
    """

    fleet: Fleet
    base_digest: str
    inbox: Inbox
    retries: Retries
    adapter: ServedAdapter | None
    forget_adapter: Callable[[], None]
    deadline: float
    room: Promise | None = None
    tenant: str = ""
    weight: float = 1.0
    salt: str = ""
    drafts: str | None = None
    session: str = ""
    places: Mapping[str, str] = {}

    def failure(self, code: ErrorCode, message: str) -> SequenceFailed:
        """The failure of a sequence. A worker that blames a picture begins with its digest."""
        picture, _, problem = message.partition(": ")
        where = self.places.get(picture)
        if where is None:
            return SequenceFailed(code, message)
        return SequenceFailed(code, f"`{where}`: {problem}", where)


def ids_with_pictures(request: GenerateRequest) -> Sequence[int]:
    """The prompt's ids; a number of each picture's own stands for its first placeholder."""
    if not request.pictures:
        return request.prompt_ids
    ids = list(request.prompt_ids)
    for span in request.pictures:
        ids[span.start] = int(span.picture[:15], 16)
    return ids


class SequenceRun:
    """Runs one sequence on workers: `start` it once, then `stop` it. request: attempt 0, nothing
    accepted. slot: names the run in the inbox. bill: of the run that this one follows; None = it
    follows none.
    """

    def __init__(
        self,
        context: RunContext,
        slot: int,
        request: GenerateRequest,
        observer: SequenceObserver,
        bill: Bill | None = None,
    ) -> None:
        self._context = context
        self._slot = slot
        self._request = request
        self._accepted: list[int] = []
        self._attempts = Attempts()
        self._session: WorkerSession | None = None
        self._on_probation = False
        self._bill = bill
        self._done = False
        self._placed = self._placement_request()
        self._observer = observer
        self._placing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Brings it into the queue."""
        self._placing = self._start_placing(0.0)

    def reading(self, slot: int, ids: Sequence[int], observer: SequenceObserver) -> "SequenceRun":
        """Makes the run that reads the hidden state behind the prompt and these of its tokens. The
        state's client has waited already, so the run keeps its place in the queue."""
        request = msgspec.structs.replace(
            self._request,
            request_id=f"{self._request.request_id}.state",
            prompt_ids=[*self._request.prompt_ids, *ids],
            sampling=SamplingParams(max_tokens=0),
            vector=VectorParams(),
            drafts=None,
            routed_experts=False,
        )
        return SequenceRun(self._context, slot, request, observer, self._bill)

    def stop(self) -> None:
        """Ends the run wherever it is; nothing more comes from it."""
        self._end()
        if self._placing is not None:
            self._placing.cancel()
        self._end_probation()
        if self._session is not None:
            request = self._request
            self._session.abandon(request.request_id, self._attempts.number, request.choice)
            self._session = None

    # Placing

    def _start_placing(self, delay_s: float, probe: bool = False) -> asyncio.Task[None]:
        task = asyncio.create_task(self._place(delay_s, probe))
        task.add_done_callback(self._end_placing)
        return task

    def _end_placing(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    async def _place(self, delay_s: float, probe: bool) -> None:
        """Brings the current attempt to a worker. What it raises is the request's failure."""
        if delay_s:
            await asyncio.sleep(delay_s)
        if probe:
            self._on_probation = await self._context.retries.probation.acquire()
        try:
            await self._place_once()
        except WorkerLost:  # before it was sent: none of this request's attempts had a part in it
            self._retry("overloaded", "the worker was lost")

    async def _place_once(self) -> None:
        context = self._context
        loop = asyncio.get_running_loop()
        started = loop.time()
        credit, reason, self._bill = await context.fleet.acquire(self._entry())
        try:
            tier = credit.session.tier(self._request.adapter)
            worker_id = credit.session.worker_id
            self._observer.placed(started, worker_id, reason, tier, self._attempts.number)
            if not await self._admit(credit):
                return
            if self._on_probation:
                await asyncio.sleep(random.uniform(0.0, _APART_S))
            self._observer.submitted()
            self._submit(credit, context.deadline - loop.time())
        finally:
            credit.release()

    def _entry(self) -> Waiting[None]:
        request = self._request
        return Waiting(
            payload=None,
            tenant=self._context.tenant,
            request=self._placed,
            prompt_tokens=len(request.prompt_ids),
            max_tokens=request.sampling.max_tokens,
            nbytes=BYTES_A_TOKEN * len(request.prompt_ids),
            priority=request.priority + (0 if self._bill is None else _RESUME_PRIORITY),
            deadline=self._context.deadline,
            weight=self._context.weight,
            bill=self._bill,
            promise=self._context.room,
        )

    def _placement_request(self) -> PlacementRequest:
        adapter = self._context.adapter
        digest = "" if adapter is None else adapter.digest
        request = self._request
        prefixes = prefix_keys(request.salt, request.acting or "", ids_with_pictures(request))
        if session := self._context.session:
            prefixes = (session_key(self._context.tenant, session), *prefixes)
        if adapter is None:
            return PlacementRequest("", prefixes=prefixes)
        return PlacementRequest(digest, home_key(adapter.origin), adapter.manifest.nbytes, prefixes)

    async def _admit(self, credit: Credit) -> bool:
        """Whether the worker has the adapter; if not, the sequence is on its way to another."""
        adapter, session = self._context.adapter, credit.session
        if adapter is None:
            return True
        try:
            await session.admit(adapter.origin, adapter.token, adapter.digest)
        except AdapterError as error:
            self._context.forget_adapter()
            if has_changed(error):
                raise changed() from error
            avoid = self._placed.avoid | {session.worker_id}
            if not self._context.fleet.may_get(adapter.digest, error, avoid):
                raise
            self._placed = self._placed._replace(avoid=avoid)
            self._retry("overloaded", error.message)
            return False
        return True

    def _submit(self, credit: Credit, seconds_left: float) -> None:
        request = msgspec.structs.replace(
            self._request,
            attempt=self._attempts.number,
            accepted_ids=self._accepted,
            deadline_s=max(0.0, seconds_left),
        )
        credit.submit(request, partial(self._receive, self._attempts.number), self._observer.spent)
        self._session = credit.session

    # Receiving: called by the connection's reader, once an event

    def _receive(self, attempt: int, event: TokenEvent) -> None:
        if self._done or attempt != self._attempts.number:
            return
        at = self._observer.received(event)
        if event.finish in ("error", "abort"):
            session, self._session = self._session, None
            if event.error == "adapter_unavailable" and session and self._request.adapter:
                session.forget(self._request.adapter)
            code = event.error or "engine_lost"
            self._retry(code, event.message or "it gave up", event.evidence)
            return
        if event.token_ids:
            self._end_probation()
        self._accepted += event.token_ids
        if self._bill is not None:
            self._bill.generated(len(event.token_ids))
        if event.finish is not None:
            self._end()
            self._session = None
        self._context.inbox.put(self._slot, event, at)
        if self._context.inbox.failed:
            self.stop()

    def _retry(self, code: ErrorCode, message: str, evidence: Evidence | None = None) -> None:
        """Goes on with another attempt if the error allows one; else fails."""
        self._end_probation()
        if self._accepted and len(self._accepted) >= self._request.sampling.max_tokens:
            self._finish_full()
            return
        context, attempts = self._context, self._attempts
        step = attempts.failed(code, len(self._accepted), evidence)
        if step == "fail":
            self._fail(context.failure(code, message))
        elif step == "quarantine":
            self._quarantine()
        elif step == "later":
            self._observer.resumed(code)
            delay = min(_BUSY_DELAY_S * 2 ** min(attempts.number, 8), _LONGEST_BUSY_DELAY_S)
            delay *= random.uniform(0.5, 1.5)
            self._placing = self._start_placing(delay, attempts.is_suspect)
        else:
            self._observer.resumed(code)
            delay = context.retries.budget.take(asyncio.get_running_loop().time())
            self._placing = self._start_placing(delay, attempts.is_suspect)

    def _quarantine(self) -> None:
        request = self._request
        asked = (request.prompt_ids, request.pictures, request.sampling)
        mark = fingerprint(self._context.base_digest, request.acting, *asked)
        self._context.retries.quarantine.add(mark, asyncio.get_running_loop().time())
        self._observer.quarantined()
        logger.error("request %s killed the workers that it ran on", request.request_id)
        self._fail(RequestQuarantined())

    def _end_probation(self) -> None:
        if self._on_probation:
            self._on_probation = False
            self._context.retries.probation.release()

    def _finish_full(self) -> None:
        """Ends a sequence whose tokens all came: only the word that they were all was lost."""
        self._end()
        request = self._request
        event = TokenEvent(
            request_id=request.request_id,
            attempt=self._attempts.number,
            choice=request.choice,
            index=len(self._accepted),
            token_ids=(),
            finish="length",
        )
        self._context.inbox.put(self._slot, event, time.monotonic())

    def _end(self) -> None:
        self._done = True
        if self._bill is not None:
            self._bill.settle()

    def _fail(self, error: BaseException) -> None:
        self._end()
        self._context.inbox.fail(error)
