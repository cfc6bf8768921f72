"""Reads bodies by the limits of the base that they are for."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from loraplex.adapters.ref import split_version
from loraplex.router.api.request.fields import within_base
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.named_models import named_models
from loraplex.router.call import AdapterChoice, Api, GenerationCall, MergedChoice
from loraplex.router.failures import as_request_errors
from loraplex.router.names.catalog import CatalogRules
from loraplex.router.tenancy.keys import Caller
from loraplex.router.workers.bases import BaseModel, Bases

T = TypeVar("T")
# `parse` of an API's module: body, limits, the value of `Authorization: Bearer …`.
ParseBody = Callable[[bytes, ApiLimits, str | None], T]


class Unread(NamedTuple, Generic[T]):
    """A body that is to be read. call_of: the call in what `parse` makes. api: of the errors."""

    body: bytes
    parse: ParseBody[T]
    caller: Caller
    bearer: str | None
    call_of: Callable[[T], GenerationCall]
    api: Api = "chat"


class Read(NamedTuple, Generic[T]):
    """A body that was read for a base. named: the base's name, if the body itself says it with an
    adapter. is_certain: False = only its adapter, once resolved, says which base it is for.
    """

    base: BaseModel
    parsed: T
    named: str = ""
    is_certain: bool = True


class BodyReader:
    """Reads bodies of every API. rules: say which base a registered adapter has."""

    def __init__(self, bases: Bases, rules: CatalogRules) -> None:
        self._bases = bases
        self._rules = rules

    async def read(self, unread: Unread[T], *, waits: bool) -> Read[T]:
        """Reads a body by the base that it names, or whose adapter it names. waits: for workers, if
        nothing is known of the base yet. Raises RequestError.
        """
        if not self._bases.are_several:
            return await self.read_for(self._bases.first, unread, waits=waits)
        turns = self._bases.first.turns_of(unread.caller)
        words = await turns.parsed(unread.body, named_models)
        base, named = self._asked(words, unread.caller.tenant)
        if base is not None:
            read = await self.read_for(base, unread, waits=waits)
            return read._replace(named=named)
        likeliest = self._bases.likeliest
        read = await self.read_for(likeliest, unread, self._bases.limits, waits=waits)
        choice = unread.call_of(read.parsed).adapter
        if choice is None:
            return read
        found = self._of_choice(choice.asked_by(unread.caller.tenant))
        if found is not None:
            return await self.read_for(found, unread, waits=waits)
        return read._replace(is_certain=False)

    async def read_for(
        self,
        base: BaseModel,
        unread: Unread[T],
        limits: Callable[[], ApiLimits] | None = None,
        *,
        waits: bool,
    ) -> Read[T]:
        """Reads a body for a base. limits: None = the base's. Raises RequestError."""
        if base.text is None and waits:  # without a model nothing can be said of the body
            with as_request_errors(unread.api):
                await base.fleet.until_ready(unread.caller.tenant, len(unread.body))
        turns = base.require_for(unread.caller).turns

        def parse(body: bytes) -> T:
            return unread.parse(body, limits() if limits else base.limits, unread.bearer)

        return Read(base, await turns.parsed(unread.body, parse))

    def _asked(self, words: list[str], tenant: str) -> tuple[BaseModel | None, str]:
        """The base that these names mean, and its name if it is among them."""
        words = words or [self._bases.first.limits.default_adapter]
        for word in words:
            base = self._bases.named(word) or self._before_colon(word)
            if base is not None:
                return base, base.name
        for word in words:
            if self._bases.first.is_named(word):  # what clients send who know of one model
                return self._bases.first, ""
            base = self._of_registered(word, tenant)
            if base is not None:
                return base, ""
        return None, ""

    def _before_colon(self, word: str) -> BaseModel | None:
        """The base of SGLang's `base:adapter`."""
        for base in self._bases:
            names = (base.name, *base.limits.base_names)
            if within_base(word, names) != word:
                return base
        return None

    def _of_registered(self, name: str, tenant: str) -> BaseModel | None:
        name, _ = split_version(name.removeprefix("alias:"))
        found = self._rules.aliases.find(tenant, name)
        return None if found is None or found.base is None else self._bases.of(found.base)

    def _of_choice(self, choice: AdapterChoice | MergedChoice) -> BaseModel | None:
        """The base that a choice means, or whose adapter it is, as far as is known."""
        first = choice.members[0] if isinstance(choice, MergedChoice) else choice
        found = self._bases.named(first.adapter_id)
        registration = self._rules.registration(first)
        if found is not None or registration is None or registration.base is None:
            return found
        return self._bases.of(registration.base)
