"""Starts a GenerationCall: its adapter, its prompts, its place in the queue."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from adapters.grammar.limits import GrammarLimits
from router.call import DIGEST_HEADER, AnswerHead, Api, GenerationCall, RequestError
from router.failures import FAILURES, NoWorker, RequestQuarantined, Stopping, request_error
from router.generation.answer_ends import AnswerEnds
from router.generation.answer_parts import AnswerParts, PartsOfAnswers
from router.generation.answer_shape import AnswerShapes
from router.generation.generation import Generation, PromptTask
from router.generation.inbox import Inbox
from router.generation.meter import RequestMeter
from router.generation.prompts import Prompt, build_prompts, resolve_sampling
from router.generation.sequence import BYTES_A_TOKEN, Retries, RunContext, fingerprint
from router.names.catalog import Catalog
from router.names.served import ServedAdapter
from router.names.use import AdapterUse
from router.policy.guards import GuardSample
from router.policy.queue.queue_limits import Promise, QueueFull
from router.policy.quota import UNSTATED_TOKENS
from router.policy.rollout import sticky_value
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request import in_hand
from router.telemetry.request_log import note_call
from router.tenancy.metering import Charge
from router.text.model import TextModel
from router.text.template_sandbox import TemplateSandbox
from router.workers.base_model import BaseModel
from router.workers.fleet import Fleet
from server.protocol import SamplingParams

_SEED_BITS = 53  # what JSON numbers carry without loss everywhere


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """From RouterConfig: see there."""

    max_requests: int
    max_stream_buffer: int
    max_stream_buffer_bytes: int
    request_timeout_s: float
    share_prefixes: bool
    parts: AnswerParts
    grammars: GrammarLimits


class Dispatcher:
    """Starts generations. `running` counts those that are not closed. ends, shapes: of their
    answers."""

    def __init__(
        self,
        base: BaseModel,
        catalog: Catalog,
        fleet: Fleet,
        sandbox: TemplateSandbox,
        metrics: RouterMetrics,
        limits: DispatchLimits,
        use: AdapterUse,
        retries: Retries,
    ) -> None:
        self.ends = AnswerEnds(sandbox)
        self.shapes = AnswerShapes(limits.grammars)
        self.running = 0
        self.draining = False
        self._inboxes: set[Inbox] = set()
        self._starting: set[asyncio.Timeout] = set()
        self._base = base
        self._catalog = catalog
        self._fleet = fleet
        self._sandbox = sandbox
        self._metrics = metrics
        self._limits = limits
        self._use = use
        self._retries = retries

    async def until_ready(self, tenant: str, nbytes: int, api: Api) -> None:
        """Waits for a worker, for a while, with a body of `nbytes` in hand. Raises RequestError."""
        try:
            await self._fleet.until_ready(tenant, nbytes)
        except (NoWorker, QueueFull) as error:
            raise request_error(error, api) from error

    @property
    def max_requests(self) -> int:
        return self._limits.max_requests

    async def start(self, call: GenerationCall, charge: Charge) -> Generation:
        """Resolves, tokenises, checks and queues. Raises RequestError.

        charge: the request's own; closed when the generation is, or when it could not be started.
        """
        note_call(in_hand(), call, self._base.require().card.names[0])
        if self.running >= self._limits.max_requests:
            raise RequestError("overloaded", f"{self.running} requests are being answered already")
        self.running += 1
        with ExitStack() as held:  # until the generation is closed, or could not be started
            held.callback(self._closed)
            held.callback(charge.close)
            return await self._start(call, charge, held)

    async def _start(self, call: GenerationCall, charge: Charge, held: ExitStack) -> Generation:
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._limits.request_timeout_s
        try:
            async with self._until(deadline):
                model = self._base.require()
                self._fleet.check_ready()
                # Before any work is done for it: to refuse must be cheap.
                charge.check()
                self._check_room(call.tenant, max(1, len(call.prompts)) * call.best_of, 0)
                adapter = await self._resolve(call, charge.key_id, charge.request_id)
                if adapter is not None:
                    held.callback(self._use.hold(adapter))
                prompts = await self._build_prompts(call, model, adapter)
                parts = self._parts_of(call, model, adapter)
                ends = await self.ends.of(model, None if adapter is None else adapter.manifest)
                call = await self.shapes.hold(call, model, parts, prompts[0].text)
            call = _with_ranking(_with_ends(call, ends))
            samplings = [resolve_sampling(call, model, prompt) for prompt in prompts]
            self._check_quarantine(adapter, prompts, samplings)
            room = self._take_room(call, prompts)
            held.callback(self._fleet.queue.release, room)
        except FAILURES as error:
            raise request_error(error, call.api) from error
        limits, choices = self._limits, call.best_of * len(prompts)
        # The reader of a whole answer is this process, which reads as soon as it can.
        most = limits.max_stream_buffer * choices if call.stream else sys.maxsize
        inbox = Inbox(most, limits.max_stream_buffer_bytes)
        self._inboxes.add(inbox)
        held.callback(self._inboxes.discard, inbox)
        context = RunContext(
            fleet=self._fleet,
            inbox=inbox,
            metrics=self._metrics,
            retries=self._retries,
            adapter=adapter,
            forget_adapter=partial(self._catalog.forget, call.adapter),
            deadline=deadline,
            charge=charge,
            room=room,
            tenant=call.tenant,
            weight=call.weight,
            salt=_salt(call, self._limits.share_prefixes),
        )
        head = _head(call, charge.request_id, model, adapter)
        counted_as = "" if adapter is None else adapter.counted_as
        await charge.admit(head, counted_as, *_tokens(call, prompts, samplings))
        self._retries.budget.request()
        tasks = [
            PromptTask(
                *(index, prompt, sampling, _seed(call, index, head.seed)),
                parts.division(call, prompt.text),
            )
            for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        meter = RequestMeter(self._metrics, adapter, started, loop.time)
        return Generation(call, head, model, tasks, context, meter, held.pop_all().close)

    async def prompts(self, call: GenerationCall, key_id: str, request_id: str) -> list[Prompt]:
        """Those that `start` would run, of any length; nothing is run. Raises RequestError."""
        deadline = asyncio.get_running_loop().time() + self._limits.request_timeout_s
        try:
            async with self._until(deadline):
                model = self._base.require()
                adapter = await self._resolve(call, key_id, request_id)
                return await self._build_prompts(call, model, adapter)
        except FAILURES as error:
            raise request_error(error, call.api) from error

    def give_up(self) -> None:
        """All that is being answered ends in an error: the router stops."""
        for inbox in self._inboxes:
            inbox.fail(Stopping())
        now = asyncio.get_running_loop().time()
        for scope in self._starting:
            scope.reschedule(now)

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Raises TimeoutError, Stopping."""
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                self._starting.add(scope)
                try:
                    yield
                finally:
                    self._starting.discard(scope)
        except TimeoutError:
            if scope.when() != deadline:
                raise Stopping from None
            raise

    def _check_quarantine(
        self,
        adapter: ServedAdapter | None,
        prompts: Sequence[Prompt],
        samplings: Sequence[SamplingParams],
    ) -> None:
        """Raises RequestQuarantined."""
        quarantine = self._retries.quarantine
        if not len(quarantine):
            return
        digest = None if adapter is None else adapter.digest
        now = asyncio.get_running_loop().time()
        for prompt, sampling in zip(prompts, samplings, strict=True):
            if quarantine.holds(fingerprint(digest, prompt.ids, sampling), now):
                raise RequestQuarantined

    def _take_room(self, call: GenerationCall, prompts: Sequence[Prompt]) -> Promise:
        """For all its sequences or none, before anything is charged. Raises as `_check_room`."""
        count = len(prompts) * call.best_of
        nbytes = BYTES_A_TOKEN * call.best_of * sum(len(prompt.ids) for prompt in prompts)
        self._check_room(call.tenant, count, nbytes)
        return self._fleet.queue.promise(call.tenant, count, nbytes)

    def _check_room(self, tenant: str, sequences: int, nbytes: int) -> None:
        """Raises QueueFull; RequestError for more than the queue could ever hold."""
        queue = self._fleet.queue
        limits = queue.capacity.limits
        most, most_bytes = limits.most_at_once, limits.most_bytes_at_once
        if sequences > most:
            raise RequestError("invalid", f"at most {most} sequences a request, got {sequences}")
        if nbytes > most_bytes:
            raise RequestError(
                "invalid", f"at most {most_bytes} bytes of prompts a request, got {nbytes}"
            )
        queue.check_room(tenant, sequences, nbytes, asyncio.get_running_loop().time())

    async def _build_prompts(
        self, call: GenerationCall, model: TextModel, adapter: ServedAdapter | None
    ) -> list[Prompt]:
        template = None if adapter is None else adapter.manifest.template
        try:
            return await build_prompts(call, model, template, self._sandbox)
        except RequestError as error:
            if adapter is not None:
                error.headers[DIGEST_HEADER] = adapter.digest
                if adapter.rollout and error.cause == "template_error":
                    self._metrics.outcomes.add(adapter.rollout, adapter.digest, GuardSample(True))
            raise

    def _parts_of(
        self, call: GenerationCall, model: TextModel, adapter: ServedAdapter | None
    ) -> PartsOfAnswers:
        """Raises RequestError."""
        if adapter is None:
            return self._limits.parts.of(call, model.card)
        return self._limits.parts.of(
            call, model.card, adapter.manifest.template, adapter.tool_format
        )

    async def _resolve(
        self, call: GenerationCall, key_id: str, request_id: str
    ) -> ServedAdapter | None:
        if call.adapter is None:
            return None
        sticky = sticky_value(call.tenant, call.user, key_id, request_id)
        started = asyncio.get_running_loop().time()
        outcome = "failed"
        try:
            adapter = await self._catalog.resolve(call.adapter, sticky)
            outcome = "ready"
            return adapter
        finally:
            ended = asyncio.get_running_loop().time()
            self._metrics.adapter_load_s.labels(outcome).observe(ended - started)
            in_hand().trace.stage("resolve", started, ended, {"loraplex.outcome": outcome})

    def _closed(self) -> None:
        self.running -= 1


def _tokens(
    call: GenerationCall, prompts: Sequence[Prompt], samplings: Sequence[SamplingParams]
) -> tuple[int, int]:
    """Of all prompts; and the most that may come, or what is reserved where nobody said it."""
    most = (
        sampling.max_tokens
        if call.max_tokens is not None
        else min(sampling.max_tokens, UNSTATED_TOKENS)
        for sampling in samplings
    )
    return sum(len(prompt.ids) for prompt in prompts), call.best_of * sum(most)


def _with_ends(call: GenerationCall, ends: tuple[int, ...]) -> GenerationCall:
    sampling = msgspec.structs.replace(call.sampling, end_token_ids=ends)
    return msgspec.structs.replace(call, sampling=sampling)


def _with_ranking(call: GenerationCall) -> GenerationCall:
    """The best of several are found by their log-probabilities, whether or not they are shown."""
    if call.best_of <= call.n or call.sampling.logprobs is not None:
        return call
    sampling = msgspec.structs.replace(call.sampling, logprobs=0)
    return msgspec.structs.replace(call, sampling=sampling)


def _salt(call: GenerationCall, share_prefixes: bool) -> str:
    """Whose cached prefixes it may use. No tenant's name has a colon."""
    tenant = "" if share_prefixes else call.tenant
    return f"{tenant}:{call.cache_salt}" if call.cache_salt else tenant


def _seed(call: GenerationCall, prompt_index: int, seed: int) -> int:
    """Prompts of one call are as independent as calls are, unless the caller fixed the seed."""
    return seed if call.seed is not None or prompt_index == 0 else secrets.randbits(_SEED_BITS)


def _head(
    call: GenerationCall, request_id: str, model: TextModel, adapter: ServedAdapter | None
) -> AnswerHead:
    return AnswerHead(
        request_id=request_id,
        created=int(time.time()),
        model=model.card.names[0] if adapter is None else adapter.adapter_id,
        adapter_id=None if adapter is None else adapter.adapter_id,
        adapter_digest=None if adapter is None else adapter.digest,
        seed=secrets.randbits(_SEED_BITS) if call.seed is None else call.seed,
        base_digest=model.card.base_digest,
    )
