"""A generation request's way in: from its body to sequences that wait for workers, with the value
of each step."""

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.router.api.request.formatter import ApiRequest
from loraplex.router.api.request.pictures import check_given, without_pictures
from loraplex.router.call import (
    DIGEST_HEADER,
    AdapterChoice,
    AnswerHead,
    GenerationCall,
    MergedChoice,
    RequestError,
    adapter_field,
)
from loraplex.router.config import RouterConfig
from loraplex.router.failures import Aborted, RequestQuarantined, Stopping, as_request_errors
from loraplex.router.generation.body_reader import BodyReader, ParseBody, Read, Unread
from loraplex.router.generation.generation import Generation
from loraplex.router.generation.prompts import Prompt
from loraplex.router.generation.sequence import (
    BYTES_A_TOKEN,
    Inbox,
    Retries,
    RunContext,
    fingerprint,
)
from loraplex.router.generation.tokenise import TokenisedRequest, Tokeniser
from loraplex.router.generation.vectors import check_early, check_kind
from loraplex.router.names.catalog import Catalog
from loraplex.router.names.served import ServedAdapter
from loraplex.router.names.use import AdapterUse
from loraplex.router.pictures.held import HeldPictures
from loraplex.router.policy.queue.queue_limits import Promise
from loraplex.router.policy.queue.waiting import WaitingQueue
from loraplex.router.policy.rollout import sticky_value
from loraplex.router.telemetry.observer import RequestObserver
from loraplex.router.tenancy.keys import Caller, check_scope
from loraplex.router.tenancy.metering import Charge
from loraplex.router.tenancy.usage import OTHER
from loraplex.router.text.model import TextModel
from loraplex.router.text.stops import BYTES_A_CHARACTER
from loraplex.router.workers.bases import BaseModel, Bases
from loraplex.router.workers.fleet import Fleet

# Of the requests that are answered at once: the part of one tenant, where callers have keys, and of
# all batches together.
MOST_OF_ONE = 3 / 4
# Events of a whole answer for which its reader is woken.
_GATHERED = 16

T = TypeVar("T")


class ArrivedRequest(msgspec.Struct, frozen=True):
    """A request whose body is here. parse: of its API. bearer: for sources of adapters; None =
    there is none, or it is a key. session: the caller's, which had better run on one worker; "" =
    none.
    """

    request_id: str
    caller: Caller
    body: bytes
    parse: ParseBody[ApiRequest]
    bearer: str | None = None
    session: str = ""


class AuthorisedRequest(msgspec.Struct, frozen=True):
    """A request that its caller may make. adapter: as this caller has it. session: as it came."""

    request_id: str
    caller: Caller
    call: GenerationCall
    adapter: AdapterChoice | MergedChoice | None
    session: str = ""

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def priority(self) -> int:
        """Priority of the request: lower goes first."""
        return self.caller.priority + self.call.priority


class ResolvedRequest(msgspec.Struct, frozen=True):
    """The present meaning of a request's names.

    adapter: None = the base. model: as it is under the adapter.
    """

    model: TextModel
    adapter: ServedAdapter | None

    @classmethod
    def of(cls, model: TextModel, adapter: ServedAdapter | None) -> "ResolvedRequest":
        """A resolved request; its model has the adapter's classes. model: of the base."""
        classes = None if adapter is None else adapter.manifest.classes
        return cls(model if classes is None else model.under(classes), adapter)

    @property
    def digest(self) -> str | None:
        """Digest of the adapter; None for the base."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def acting(self) -> str | None:
        """Adapter that acts, as in `GenerateRequest.acting`."""
        return None if self.adapter is None else self.adapter.acting


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that may run. head: of its answer. room: in the queue, for all its sequences."""

    head: AnswerHead
    room: Promise


class Started(NamedTuple):
    """A request that is under way; its reader closes the generation."""

    generation: Generation
    api_request: ApiRequest


class Dispatcher:
    """Starts generations. `running` counts those that are not closed."""

    # When the last of those was closed that are no lines of batches, on the loop's clock.
    _live_until = -math.inf

    def __init__(
        self,
        bases: Bases,
        catalog: Catalog,
        tokeniser: Tokeniser,
        config: RouterConfig,
        use: AdapterUse,
        pictures: HeldPictures,
        retries: Retries,
    ) -> None:
        self._pictures = pictures
        self.draining = False
        self._live: Counter[str] = Counter()  # by tenant
        self._batches: Counter[str] = Counter()
        self._tokeniser = tokeniser
        self._inboxes: set[Inbox] = set()
        # Of requests that no batch asks: whose each is, and its ids.
        self._abortable: dict[Inbox, tuple[str, frozenset[str]]] = {}
        self._starting: set[asyncio.Timeout] = set()
        self.reader = BodyReader(bases, catalog.rules)
        self._bases = bases
        self._catalog = catalog
        self._config = config
        self._use = use
        self._retries = retries

    @property
    def running(self) -> int:
        return self._live.total() + self._batches.total()

    @property
    def live_at(self) -> float:
        """Time when a request that is no batch's was there last; now if one is."""
        return asyncio.get_running_loop().time() if self._live else self._live_until

    @property
    def max_requests(self) -> int:
        return self._config.max_requests

    async def start(
        self, arrived: ArrivedRequest, charge: Charge, observer: RequestObserver
    ) -> Started:
        """Starts a request by all steps: parse, authorise, enter, resolve, tokenise, admit, run.
        Raises RequestError.

        What a step takes is given back when the generation is closed, or could not be started.
        """
        read = await self._parse(arrived)
        authorised, model = await self._begin(arrived, read)
        name = model.card.names[0]
        observer.asked(authorised.call, authorised.tenant, name, read.base.name)
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        with ExitStack() as held, as_request_errors(authorised.call.api):
            held.callback(observer.closed)
            charge.adapter = "" if authorised.adapter is None else OTHER
            self._count(held, authorised.caller)
            async with self._until(deadline):
                of_base = held.enter_context(ExitStack())
                of_base.callback(read.base.hold())
                await self._enter(authorised, read.base, charge)
                adapter = await self._resolve(authorised, observer)
                if adapter is not None:
                    charge.adapter = adapter.counted_as
                    held.callback(self._use.hold(adapter))
                    if (base := self._bases.of(adapter.base)) is not read.base:
                        read = await self._parse(arrived, base)
                        of_base.close()
                        of_base.callback(base.hold())
                        observer.of_base(base.name)
                        authorised, model = await self._begin(arrived, read)
                resolved = await self._with_text(model, adapter)
                check_kind(authorised.call, resolved.model.card, resolved.adapter)
                tokenised = await self._tokenise(authorised, resolved, observer)
            fleet = read.base.fleet
            admitted = await self._admit(authorised, resolved, tokenised, fleet, charge, held)
            generation = await self._run(
                authorised, resolved, tokenised, admitted, fleet, deadline, observer, held
            )
        slim = msgspec.structs.replace(read.parsed, call=without_pictures(read.parsed.call))
        return Started(generation, slim)

    async def _begin(
        self, arrived: ArrivedRequest, read: Read[ApiRequest]
    ) -> tuple[AuthorisedRequest, TextModel]:
        """Authorises, and waits for workers. Returns the base's texts, too. Raises RequestError."""
        authorised = self.authorise(read, read.parsed.call, arrived.caller, arrived.request_id)
        authorised = msgspec.structs.replace(authorised, session=arrived.session)
        with as_request_errors(authorised.call.api):
            await read.base.fleet.until_ready(authorised.tenant, len(arrived.body))
        # Not before: a worker that came in the meantime may serve another model.
        model = read.base.require_for(authorised.caller)
        if read.is_certain:
            check_early(authorised.call, model.card)
            check_given(authorised.call, model.card)
        return authorised, model

    async def prompts(
        self, authorised: AuthorisedRequest, base: BaseModel, observer: RequestObserver
    ) -> tuple[TextModel, list[Prompt]]:
        """Prompts that `start` would run, of any length, and the model of their tokens. Nothing is
        run. Raises RequestError."""
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        with ExitStack() as held, as_request_errors(authorised.call.api):
            self._count(held, authorised.caller)
            async with self._until(deadline):
                adapter = await self._resolve(authorised, observer)
                base = base if adapter is None else self._bases.of(adapter.base)
                model = base.require_for(authorised.caller)
                resolved = await self._with_text(model, adapter)
                return resolved.model, await self._prompts(authorised, resolved, observer)

    def abort(self, tenant: str | None, rid: str | None) -> None:
        """Ends those answers of the tenant's that have this id, the request's or the caller's own.
        tenant: None = everybody's. rid: None = all."""
        for inbox, (owner, ids) in self._abortable.items():
            if tenant in (None, owner) and (rid is None or rid in ids):
                inbox.fail(Aborted())

    def give_up(self) -> None:
        """Ends all that is being answered with an error: the router stops."""
        for inbox in self._inboxes:
            inbox.fail(Stopping())
        now = asyncio.get_running_loop().time()
        for scope in self._starting:
            scope.reschedule(now)

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Bounds the start of a request by a deadline. Raises TimeoutError, Stopping."""
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

    # The steps

    async def _parse(
        self, arrived: ArrivedRequest, base: BaseModel | None = None
    ) -> Read[ApiRequest]:
        """Reads the body of a request, once its model's names are known. base: None = the one that
        the body is for. Raises RequestError.
        """
        call_of: Callable[[ApiRequest], GenerationCall] = attrgetter("call")
        unread = Unread(arrived.body, arrived.parse, arrived.caller, arrived.bearer, call_of)
        if base is None:
            return await self.reader.read(unread, waits=True)
        return await self.reader.read_for(base, unread, waits=True)

    def authorise(
        self, read: Read[T], call: GenerationCall, caller: Caller, request_id: str
    ) -> AuthorisedRequest:
        """Checks that the caller's key opens what a call asks for. read: the body of the call.
        Raises RequestError for what the key does not open.
        """
        choice = call.adapter
        adapter = None if choice is None else choice.asked_by(caller.tenant, read.named)
        names, param = read.base.require().card.names, adapter_field(call.api)
        base = read.base.name if read.is_certain else ""
        check_scope(caller, adapter, names, self._catalog.rules.registered_name, param, base)
        return AuthorisedRequest(request_id, caller, call, adapter)

    def _count(self, held: ExitStack, caller: Caller) -> None:
        """Counts a request among those that run. Raises RequestError when too many run: in all, of
        a tenant with keys, or of batches.
        """
        tenant, most = caller.tenant, self._config.max_requests
        if self.running >= most:
            raise RequestError("overloaded", f"{self.running} requests are being answered already")
        part = max(1, int(most * MOST_OF_ONE))
        if caller.key is not None and self._live[tenant] + self._batches[tenant] >= part:
            message = f"{part} requests of this tenant are being answered already"
            raise RequestError("overloaded", message)
        if caller.is_batch and self._batches.total() >= part:
            raise RequestError("overloaded", f"{part} lines of batches are being answered already")
        same = self._batches if caller.is_batch else self._live
        same[tenant] += 1
        held.callback(self._closed, same, tenant)

    def _closed(self, same: Counter[str], tenant: str) -> None:
        """Takes a request from `same`, the counts of those that run."""
        same[tenant] -= 1
        if not same[tenant]:
            del same[tenant]
        if same is self._live:
            self._live_until = asyncio.get_running_loop().time()

    async def _enter(self, authorised: AuthorisedRequest, base: BaseModel, charge: Charge) -> None:
        """Checks that the queue has room, before work is done. Raises as `_admit`."""
        call = authorised.call
        count = max(1 + len(call.further), len(call.prompts)) * call.best_of
        self._check_room(base.fleet.queue, authorised.tenant, count, 0)
        await charge.enter()

    async def _resolve(
        self, authorised: AuthorisedRequest, observer: RequestObserver
    ) -> ServedAdapter | None:
        """Finds the adapter that the call names. Raises AdapterError."""
        if authorised.adapter is None:
            return None
        sticky = sticky_value(
            authorised.tenant, authorised.call.user, authorised.caller.key_id, authorised.request_id
        )
        began = asyncio.get_running_loop().time()
        try:
            adapter = await self._catalog.resolve(authorised.adapter, sticky)
        except BaseException as error:
            observer.unresolved(began)
            if isinstance(error, AdapterError) and error.code == "not_found":
                error.message += self._catalog.rules.hint(authorised.adapter, authorised.caller)
            raise
        observer.resolved(began)
        return adapter

    async def _with_text(self, base: TextModel, adapter: ServedAdapter | None) -> ResolvedRequest:
        """Finds the text model of a request's base and adapter. Raises RequestError."""
        manifest = None if adapter is None else adapter.manifest
        return ResolvedRequest.of(await self._tokeniser.model_of(base, manifest), adapter)

    async def _prompts(
        self, authorised: AuthorisedRequest, resolved: ResolvedRequest, observer: RequestObserver
    ) -> list[Prompt]:
        """Builds the prompts of a request. Raises RequestError."""
        adapter = resolved.adapter
        try:
            return await self._tokeniser.prompts(
                authorised.call, resolved.model, adapter, authorised.tenant
            )
        except RequestError as error:
            if adapter is not None:
                error.headers[DIGEST_HEADER] = adapter.digest
                if error.cause == "template_error":
                    observer.template_failed(adapter)
            raise

    async def _tokenise(
        self, authorised: AuthorisedRequest, resolved: ResolvedRequest, observer: RequestObserver
    ) -> TokenisedRequest:
        """Turns a request into the tasks that workers compute. Raises RequestError."""
        prompts = await self._prompts(authorised, resolved, observer)
        call = without_pictures(authorised.call)
        return await self._tokeniser.tokenise(call, resolved.model, resolved.adapter, prompts)

    async def _admit(
        self,
        authorised: AuthorisedRequest,
        resolved: ResolvedRequest,
        tokenised: TokenisedRequest,
        fleet: Fleet,
        charge: Charge,
        held: ExitStack,
    ) -> AdmittedRequest:
        """Reserves room in the queue for all sequences of a request or none, then its share of
        quotas. Raises RequestQuarantined, QueueFull, RequestError."""
        self._check_quarantine(resolved, tokenised)
        count = tokenised.num_sequences
        nbytes = BYTES_A_TOKEN * authorised.call.best_of * tokenised.num_prompt_tokens
        nbytes += tokenised.picture_bytes
        nbytes += BYTES_A_CHARACTER * sum(map(len, tokenised.call.stop))
        self._check_room(fleet.queue, authorised.tenant, count, nbytes)
        room = fleet.queue.promise(authorised.tenant, count, nbytes)
        held.callback(fleet.queue.release, room)
        files = (file for task in tokenised.tasks for file in task.prompt.files)
        held.callback(self._pictures.hold(files))
        head = _head(authorised, resolved, tokenised, charge)
        tokens = (tokenised.num_prompt_tokens, tokenised.most_output_tokens)
        await charge.admit(head.adapter_digest, *tokens)
        self._retries.budget.request()
        return AdmittedRequest(head, room)

    async def _run(
        self,
        authorised: AuthorisedRequest,
        resolved: ResolvedRequest,
        tokenised: TokenisedRequest,
        admitted: AdmittedRequest,
        fleet: Fleet,
        deadline: float,
        observer: RequestObserver,
        held: ExitStack,
    ) -> Generation:
        """Brings its sequences into the queue. What is held is the generation's from now on."""
        context = RunContext(
            fleet=fleet,
            base_digest=resolved.model.card.base_digest,
            inbox=self._inbox(authorised, tokenised, held),
            retries=self._retries,
            adapter=resolved.adapter,
            forget_adapter=partial(self._catalog.forget, authorised.adapter),
            deadline=deadline,
            room=admitted.room,
            tenant=authorised.tenant,
            weight=authorised.caller.weight,
            salt=_salt(authorised, self._config.share_prefixes),
            drafts=_salt(authorised, False) if authorised.call.drafts else None,
            session=authorised.session,
            places={
                file.digest: file.where for task in tokenised.tasks for file in task.prompt.files
            },
        )
        generation = Generation(
            head=admitted.head,
            model=resolved.model,
            tokenised=tokenised,
            priority=authorised.priority,
            context=context,
            observer=observer,
            on_close=held.pop_all().close,
        )
        try:
            await generation.start()
        except BaseException:
            generation.close()
            raise
        return generation

    def _inbox(
        self, authorised: AuthorisedRequest, tokenised: TokenisedRequest, held: ExitStack
    ) -> Inbox:
        call, most, nbytes, gathers = tokenised.call, sys.maxsize, sys.maxsize, 1
        if call.stream:
            most = self._config.max_stream_buffer * tokenised.num_sequences
            nbytes = self._config.max_stream_buffer_bytes
        elif not (call.stop or call.stop_regex):  # else each token may end the work for the answer
            gathers = _GATHERED
        inbox = Inbox(most, nbytes, gathers)
        self._inboxes.add(inbox)
        if not authorised.caller.is_batch:
            ids = frozenset((authorised.request_id, *authorised.call.rids))
            self._abortable[inbox] = (authorised.tenant, ids)
            held.callback(self._abortable.pop, inbox)
        held.callback(self._inboxes.discard, inbox)
        return inbox

    def _check_quarantine(self, resolved: ResolvedRequest, tokenised: TokenisedRequest) -> None:
        """Checks that no prompt of a request is in quarantine. Raises RequestQuarantined."""
        quarantine = self._retries.quarantine
        if not len(quarantine):
            return
        now = asyncio.get_running_loop().time()
        acting, base = resolved.acting, resolved.model.card.base_digest
        for task in tokenised.tasks:
            asked = (task.prompt.ids, task.prompt.pictures, task.sampling)
            if quarantine.holds(fingerprint(base, acting, *asked), now):
                raise RequestQuarantined

    def _check_room(
        self, queue: WaitingQueue[Any], tenant: str, sequences: int, nbytes: int
    ) -> None:
        """Checks that the queue has room for so many sequences and bytes. Raises QueueFull;
        RequestError for more than the queue could ever hold.
        """
        limits = queue.capacity.limits
        most, most_bytes = limits.most_at_once, limits.most_bytes_at_once
        if sequences > most:
            raise RequestError("invalid", f"at most {most} sequences a request, got {sequences}")
        if nbytes > most_bytes:
            raise RequestError(
                "invalid", f"at most {most_bytes} bytes of prompts a request, got {nbytes}"
            )
        queue.check_room(tenant, sequences, nbytes, asyncio.get_running_loop().time())


def _salt(authorised: AuthorisedRequest, share_prefixes: bool) -> str:
    """Returns the group whose cached prefixes the request may use. No tenant's name has a colon."""
    tenant = "" if share_prefixes else authorised.tenant
    cache_salt = authorised.call.cache_salt
    return f"{tenant}:{cache_salt}" if cache_salt else tenant


def _head(
    authorised: AuthorisedRequest,
    resolved: ResolvedRequest,
    tokenised: TokenisedRequest,
    charge: Charge,
) -> AnswerHead:
    card, adapter, choice = resolved.model.card, resolved.adapter, authorised.adapter
    return AnswerHead(
        request_id=authorised.request_id,
        created=int(time.time()),
        model=card.names[0] if adapter is None else adapter.adapter_id,
        adapter_id=None if adapter is None else adapter.adapter_id,
        adapter_digest=resolved.digest,
        seed=tokenised.seed,
        base_digest=card.base_digest,
        labels=() if card.classes is None else card.classes.labels,
        of_tokens=card.classes is not None and card.classes.of_tokens,
        unbound=tokenised.call.unbound,
        adapter_scale=choice.scale if isinstance(choice, AdapterChoice) else 1.0,
        receipt=charge.receipt,
    )
