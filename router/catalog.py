"""From an adapter's name to a digest that a worker has admitted: authorise, pin, load, remember.

Every request is authorised for itself: results are kept per (reference, credential) and for a short
time, so what one caller's token opened is never another's.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from adapters.errors import AdapterError
from adapters.manifest import AdapterManifest
from adapters.merge_recipe import sole_member
from adapters.ref import AdapterRef
from router.generation import AdapterChoice, MergedChoice, Secret
from router.served import Merge, Origin, ServedAdapter, changed, has_changed, merge_of

MAX_CACHED = 4096
MAX_RESOLVING = 256
_NEGATIVE_TTL_S = 5.0

Pin = Callable[[AdapterRef, Secret | None], Awaitable[AdapterRef]]
Load = Callable[[Origin, Secret | None], Awaitable[AdapterManifest]]
_Key = tuple[Origin, str]


@dataclass(frozen=True, slots=True)
class CatalogRules:
    """What the operator allows. aliases: public name -> reference, opened with `hub_token`."""

    aliases: dict[str, AdapterRef]
    hub_owners: tuple[str, ...]
    hub_token: Secret | None
    share_hub_token: bool
    ttl_s: float
    timeout_s: float

    def target(self, choice: AdapterChoice) -> tuple[AdapterRef, Secret | None]:
        """The reference to fetch, and the credential to fetch it with. Raises AdapterError."""
        spelled = choice.ref.name if choice.ref.source == "alias" else choice.adapter_id
        alias = self.aliases.get(spelled)
        if alias is not None:
            return alias, (self.hub_token or choice.token) if alias.source == "hub" else None
        if choice.ref.source == "alias":
            raise AdapterError("not_found", f"no adapter is registered as {choice.adapter_id!r}")
        self._check_owner(choice.ref)
        if choice.ref.source != "hub":
            return choice.ref, None
        return choice.ref, choice.token or (self.hub_token if self.share_hub_token else None)

    def _check_owner(self, ref: AdapterRef) -> None:
        owner = ref.name.partition("/")[0]
        if ref.source == "hub" and self.hub_owners and owner not in self.hub_owners:
            raise AdapterError("forbidden", f"adapters of {owner!r} are not allowed here")


class _Outcome(msgspec.Struct, frozen=True):
    """A remembered answer. origin (pinned) and manifest, or error."""

    until: float
    origin: Origin | None = None
    manifest: AdapterManifest | None = None
    error: AdapterError | None = None


class Catalog:
    """`pin`: reference -> reference with a commit; `load`: pinned reference -> manifest."""

    def __init__(
        self, rules: CatalogRules, pin: Pin, load: Load, clock: Callable[[], float]
    ) -> None:
        self.rules = rules
        self._pin = pin
        self._load = load
        self._clock = clock
        self._outcomes: OrderedDict[_Key, _Outcome] = OrderedDict()
        self._resolving: dict[_Key, asyncio.Task[_Outcome]] = {}

    async def resolve(self, choice: AdapterChoice | MergedChoice) -> ServedAdapter:
        """The adapter behind the caller's words. Raises AdapterError."""
        if isinstance(choice, MergedChoice):
            return await self._resolve_merge(choice)
        ref, token = self.rules.target(choice)
        return await self._serve(choice.adapter_id, ref, token)

    async def _serve(self, adapter_id: str, origin: Origin, token: Secret | None) -> ServedAdapter:
        key = (origin, _fingerprint(token))
        outcome = self._outcomes.get(key)
        if outcome is None or outcome.until <= self._clock():
            outcome = await self._resolve_once(key, token)
        if outcome.error is not None:
            raise _copy(outcome.error)
        assert outcome.origin is not None
        assert outcome.manifest is not None
        return ServedAdapter(adapter_id, outcome.origin, token, outcome.manifest)

    async def _resolve_merge(self, choice: MergedChoice) -> ServedAdapter:
        """Every member is authorised for this caller before anything is made of them."""
        tasks = [asyncio.ensure_future(self._member(choice, i)) for i in range(len(choice.members))]
        try:
            members = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        merge = merge_of(choice, members)
        sole = sole_member(merge.recipe)
        for member in members:
            if member.digest == sole:
                return msgspec.structs.replace(member, adapter_id=choice.adapter_id)
        try:
            return await self._serve(choice.adapter_id, merge, None)
        except AdapterError as error:
            if has_changed(error):
                self.forget(choice)
                self._outcomes.pop((merge, _fingerprint(None)), None)
                raise changed() from error
            raise

    async def _member(self, choice: MergedChoice, index: int) -> ServedAdapter:
        member = choice.members[index]
        try:
            return await self.resolve(member)
        except AdapterError as error:
            message = f"`merged_adapters.ids[{index}]` ({member.adapter_id}): {error.message}"
            raise AdapterError(
                error.code, message, error.violations, error.retry_after_s
            ) from error

    def forget(self, choice: AdapterChoice | MergedChoice | None) -> None:
        """What is remembered of it was wrong: the next request asks anew."""
        if isinstance(choice, MergedChoice):
            for member in choice.members:
                self.forget(member)
        elif choice is not None:
            ref, token = self.rules.target(choice)
            self._outcomes.pop((ref, _fingerprint(token)), None)

    def known_digest(self, name: str) -> str | None:
        """The digest behind a registered name, if it was resolved lately."""
        ref = self.rules.aliases.get(name)
        if ref is None:
            return None
        token = self.rules.hub_token if ref.source == "hub" else None
        outcome = self._outcomes.get((ref, _fingerprint(token)))
        return outcome.manifest.digest if outcome is not None and outcome.manifest else None

    async def _resolve_once(self, key: _Key, token: Secret | None) -> _Outcome:
        task = self._resolving.get(key)
        if task is None:
            if len(self._resolving) >= MAX_RESOLVING:
                raise AdapterError("unavailable", "too many adapters are being resolved", (), 2.0)
            task = asyncio.create_task(self._settle(key, token))
            self._resolving[key] = task
            task.add_done_callback(lambda _: self._resolving.pop(key, None))
        # Shielded: a caller who leaves does not take the adapter away from the others.
        return await asyncio.shield(task)

    async def _settle(self, key: _Key, token: Secret | None) -> _Outcome:
        outcome = await self._fetch(key[0], token)
        # A passing fault is shared with those who waited for it, and with nobody else.
        if outcome.error is None or outcome.error.code != "unavailable":
            self._outcomes[key] = outcome
            self._outcomes.move_to_end(key)
            if len(self._outcomes) > MAX_CACHED:
                self._outcomes.popitem(last=False)
        return outcome

    async def _fetch(self, origin: Origin, token: Secret | None) -> _Outcome:
        try:
            async with asyncio.timeout(self.rules.timeout_s):
                if not isinstance(origin, Merge):
                    origin = await self._pin(origin, token)
                manifest = await self._load(origin, token)
        except AdapterError as error:
            return _Outcome(self._clock() + _NEGATIVE_TTL_S, error=error)
        except TimeoutError:
            late = f"the adapter was not ready within {self.rules.timeout_s:g} s"
            return _Outcome(self._clock(), error=AdapterError("unavailable", late, (), 5.0))
        return _Outcome(self._clock() + self.rules.ttl_s, origin, manifest)


def _fingerprint(token: Secret | None) -> str:
    return "" if token is None else hashlib.sha256(token.encode()).hexdigest()


def _copy(error: AdapterError) -> AdapterError:
    """A fresh exception: one that is raised for many callers would gather all their tracebacks."""
    return AdapterError(error.code, error.message, error.violations, error.retry_after_s)
