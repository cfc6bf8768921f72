"""From an adapter's name to a digest that a worker has admitted: authorise, pin, load, remember.

Every request is authorised for itself. Results are kept per (reference, credential) and for a short
time, so what one caller's token opened is never another's.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from loraplex.adapters.common.nearest import did_you_mean, one_edit_away
from loraplex.adapters.common.newest import NewestKept
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.recipe import sole_member
from loraplex.adapters.ref import AdapterRef, format_ref, is_name, split_version
from loraplex.router.call import AdapterChoice, MergedChoice, Secret
from loraplex.router.config import MAX_ADAPTER_TTL_S
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.registration import Registration, check_served, seen
from loraplex.router.names.served import (
    Merge,
    Origin,
    ServedAdapter,
    changed,
    has_changed,
    merge_of,
)
from loraplex.router.policy.rollout import Content
from loraplex.router.shared_tasks import SharedTasks
from loraplex.router.tenancy.keys import Caller, opens

log = logging.getLogger(__name__)

MAX_CACHED = 4096
MAX_RESOLVING = 256
_NEGATIVE_TTL_S = 5.0
# What a source says of a reference that somebody declared.
_OF_OPERATOR = ("not_found", "unauthorized", "forbidden")

Pin = Callable[[AdapterRef, Secret | None], Awaitable[AdapterRef]]
# The third argument and the second value are the names of bases: of the one that must have it ("" =
# its config says), and of the one that has it.
Load = Callable[[Origin, Secret | None, str], Awaitable[tuple[AdapterManifest, str]]]


class _Key(NamedTuple):
    """Key of a remembered answer. base: as of `Load`. credential: its fingerprint."""

    origin: Origin
    credential: str
    base: str


@dataclass(frozen=True, slots=True)
class CatalogRules:
    """Rules of the operator. aliases: opened with their own token, or with `hub_token`."""

    aliases: Aliases
    hub_owners: tuple[str, ...]
    hub_token: Secret | None
    share_hub_token: bool
    ttl_s: float
    timeout_s: float

    def target(self, choice: AdapterChoice) -> tuple[AdapterRef, Secret | None]:
        """The reference to fetch, and the credential to fetch it with. Raises AdapterError."""
        alias = self.registration(choice)
        self._check_known(choice, alias)
        if alias is not None:
            check_served(alias)
            is_hub = alias.ref.source == "hub"
            return alias.ref, self.credential(alias) or (choice.token if is_hub else None)
        if choice.ref.source == "alias" or self.aliases.is_claimed(
            choice.tenant, choice.adapter_id
        ):
            if self.aliases.is_expected(choice.tenant, split_version(_spelled(choice))[0]):
                soon = f"adapter {choice.adapter_id!r} is still being checked; try again soon"
                raise AdapterError("unavailable", soon, (), 2.0)
            raise AdapterError("not_found", f"no adapter is registered as {choice.adapter_id!r}")
        if choice.ref.source == "upload":
            raise AdapterError("forbidden", "an upload is used by the name that it was put under")
        self.check_owner(choice.ref)
        if choice.ref.source != "hub":
            return choice.ref, None
        return choice.ref, choice.token or (self.hub_token if self.share_hub_token else None)

    def hint(self, choice: AdapterChoice | MergedChoice, caller: Caller) -> str:
        """The end of a sentence about an unknown name: one that the caller may mean and use."""
        if isinstance(choice, MergedChoice):
            return ""
        return did_you_mean(
            one_edit_away(choice.adapter_id, lambda name: self.usable(name, caller) is not None)
        )

    def usable(self, name: str, caller: Caller) -> Registration | None:
        """The registered adapter of this name that the caller may use."""
        found = self.aliases.find(caller.tenant, name)
        if found is None or not found.in_service:
            return None
        return found if opens(caller, found.name, found.base) else None

    def registration(self, choice: AdapterChoice) -> Registration | None:
        """The registration that the caller named, present or past."""
        return self._named(choice)[0]

    def content(self, choice: AdapterChoice, alias: Registration, sticky: str) -> Content:
        """The content of a registration in service, for one caller. Raises AdapterError for a
        version that is not kept, and for one of a base that this router does not serve.
        """
        number = self._named(choice)[1]
        content = alias.chosen(sticky) if number is None else alias.version(number)
        assert content is not None
        if content.base not in self.aliases.bases:
            message = (
                f"adapter {alias.name!r} is for the base {content.base!r}, which is none of this "
                "router's (--base): declare the base by this name, or refresh the adapter"
            )
            raise AdapterError("invalid", message)
        return content

    def _named(self, choice: AdapterChoice) -> tuple[Registration | None, int | None]:
        """The registration that the caller named, and the number of its version."""
        name, number = split_version(_spelled(choice))
        found = self.aliases.find(choice.tenant, name)
        if number is None or choice.ref.source == "alias" or (found and found.last_version):
            return found, number
        return None, None  # a branch of the Hub may have a number for its name

    def registered_name(self, choice: AdapterChoice) -> str | None:
        registration = self.registration(choice)
        return None if registration is None else registration.name

    def _check_known(self, choice: AdapterChoice, alias: Registration | None) -> None:
        """Raises AdapterError while a name might turn out to be registered, or the tenant's own."""
        is_certain = alias is not None and alias.tenant == choice.tenant
        if (
            not is_certain
            and not self.aliases.is_known
            and is_name(split_version(_spelled(choice))[0])
        ):
            unread = "registered adapters are not known yet: no Redis; try again soon"
            raise AdapterError("unavailable", unread, (), 2.0)

    def credential(self, alias: Registration) -> Secret | None:
        """The credential for a registration. Credentials of callers and operators are the Hub's; no
        other source is shown them.
        """
        return alias.token or self.hub_token if alias.ref.source == "hub" else None

    def check_owner(self, ref: AdapterRef) -> None:
        owner = ref.name.partition("/")[0]
        if ref.source == "hub" and self.hub_owners and owner not in self.hub_owners:
            raise AdapterError("forbidden", f"adapters of {owner!r} are not allowed here")


class _Outcome(msgspec.Struct, frozen=True):
    """A remembered answer. origin (pinned), manifest and base, or error."""

    until: float
    origin: Origin | None = None
    manifest: AdapterManifest | None = None
    error: AdapterError | None = None
    base: str = ""


class Catalog:
    """Finds the adapter that a request names, and remembers contents. `pin`: reference -> reference
    with a commit; `load`: pinned reference -> manifest, see `Load`.

    clock: seconds, monotonic. unix_time: seconds since the epoch.
    """

    def __init__(
        self,
        rules: CatalogRules,
        pin: Pin,
        load: Load,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
    ) -> None:
        self.rules = rules
        self._unix_time = unix_time
        self._pin = pin
        self._load = load
        self._clock = clock
        self._outcomes = NewestKept[_Key, _Outcome](MAX_CACHED)
        self._resolving = SharedTasks[_Key, _Outcome]()

    async def resolve(
        self, choice: AdapterChoice | MergedChoice, sticky: str = ""
    ) -> ServedAdapter:
        """The adapter behind the caller's words. Raises AdapterError. sticky: what decides which
        version of a name this caller gets, see `Rollout`."""
        if isinstance(choice, MergedChoice):
            return await self._resolve_merge(choice, sticky)
        if choice.scale != 1:
            return await self._resolve_scaled(choice, sticky)
        ref, token = self.rules.target(choice)
        alias = self.rules.registration(choice)
        if alias is not None and alias.state == "ready":
            return await self._of_base(self._served(choice, alias, sticky), choice.base)
        try:
            base = choice.base if alias is None else ""
            served = await self._serve(choice.adapter_id, ref, token, base)
        except AdapterError as error:
            self._note_failure(choice, ref, token, error)
            if alias is not None and self._is_operators(error, alias, token):
                message = f"adapter '{alias.name}' is declared and cannot be had: {error.message}"
                raise AdapterError("invalid", message) from error
            raise
        # The name may have been given another meaning, or none, while this was waited for.
        self.rules.target(choice)
        alias = self.rules.registration(choice)
        if alias is None:
            return served
        if alias.state == "ready" or alias.ref != ref:
            return await self.resolve(choice, sticky)
        is_mended = alias.error is not None and self._is_own(alias, token)
        if is_mended:
            log.info("adapter %s can be loaded now", alias.key)
        if alias.digest != served.digest or is_mended:
            assert isinstance(served.origin, AdapterRef)
            content = Content(served.origin, served.manifest, served.base)
            self.rules.aliases.note(alias, seen(alias, content, self._unix_time()))
        own = msgspec.structs.replace(served, alias=alias.key, tool_format=alias.tool_format)
        return await self._of_base(own, choice.base)

    async def _of_base(self, served: ServedAdapter, base: str) -> ServedAdapter:
        """The adapter as workers of a base have it. base: "" = its own. Raises AdapterError."""
        if base in ("", served.base):
            return served
        there = await self._serve(served.adapter_id, served.origin, served.token, base)
        return msgspec.structs.replace(served, manifest=there.manifest, base=base, rollout="")

    async def look(self, choice: AdapterChoice) -> None:
        """Whether its source gives it to whoever opens it; asks no worker. Raises AdapterError."""
        ref, token = self.rules.target(choice)
        try:
            async with asyncio.timeout(self.rules.timeout_s):
                await self._pin(ref, token)
        except AdapterError as error:
            self._note_failure(choice, ref, token, error)
            raise
        except TimeoutError:
            raise AdapterError("unavailable", "its source does not answer") from None

    def _note_failure(
        self, choice: AdapterChoice, ref: AdapterRef, token: Secret | None, error: AdapterError
    ) -> None:
        """Notes a failure for the operator. Left out: one that the caller's credential caused, or
        of a reference that the name no longer means."""
        alias = self.rules.registration(choice)
        if alias is None or (alias.state, alias.ref) != ("registered", ref):
            return
        if self._is_own(alias, token):
            self._note_problem(alias, error.message, is_verdict=error.code != "unavailable")

    def _note_problem(self, alias: Registration, problem: str, is_verdict: bool = False) -> None:
        """Notes what is wrong with a registration. It is logged once until it is mended, however
        many requests meet it. is_verdict: what the name meant is served no more.
        """
        if alias.error is None:
            log.warning("adapter %s cannot be loaded: %s", alias.key, problem)
        content = None if is_verdict else alias.content
        after = msgspec.structs.replace(alias, error=problem, content=content)
        if after != alias:
            self.rules.aliases.note(alias, after)

    def _is_operators(self, error: AdapterError, alias: Registration, token: Secret | None) -> bool:
        """Whether the caller named it rightly, and brings nothing that could open it."""
        if error.code not in _OF_OPERATOR or not self._is_own(alias, token):
            return False
        return error.code == "not_found" or token is not None or alias.ref.source != "hub"

    def _is_own(self, alias: Registration, token: Secret | None) -> bool:
        """Whether it was opened as the operator's, and not with what a caller brought."""
        return token == self.rules.credential(alias)

    async def _serve(
        self, adapter_id: str, origin: Origin, token: Secret | None, base: str
    ) -> ServedAdapter:
        key = _Key(origin, _fingerprint(token), base)
        outcome = self._outcomes.get(key)
        if outcome is None or outcome.until <= self._clock():
            outcome = await self._resolve_once(key, token)
        if outcome.error is not None:
            raise _copy(outcome.error)
        assert outcome.origin is not None
        assert outcome.manifest is not None
        return ServedAdapter(adapter_id, outcome.origin, token, outcome.manifest, base=outcome.base)

    async def _resolve_merge(self, choice: MergedChoice, sticky: str) -> ServedAdapter:
        """Resolves a merge's members. Each is authorised before anything is made of them."""
        authorised = self._clock()
        members = await self._members(choice, sticky)
        merge = merge_of(choice, members)
        sole = sole_member(merge.recipe)
        for member in members:
            if member.digest == sole:
                return msgspec.structs.replace(member, adapter_id=choice.adapter_id)
        base = members[0].base
        try:
            served = await self._serve(choice.adapter_id, merge, None, base)
            if self._is_stale(authorised):
                await self._members(choice, sticky)
            return served
        except AdapterError as error:
            if has_changed(error):
                self.forget(choice)
                self._outcomes.pop(_Key(merge, _fingerprint(None), base), None)
                raise changed() from error
            raise

    async def _resolve_scaled(self, choice: AdapterChoice, sticky: str) -> ServedAdapter:
        """Resolve a choice with a scale. An adapter that is more than LoRA becomes other content.
        Such an adapter cannot be scaled by row."""
        plain = msgspec.structs.replace(choice, scale=1.0)
        served = await self.resolve(plain, sticky)
        if served.manifest.is_lora_alone:
            return msgspec.structs.replace(served, scale=choice.scale)
        merged = MergedChoice((plain,), (choice.scale,), "linear", 1.0, "total")
        return await self._resolve_merge(merged, sticky)

    async def _members(self, choice: MergedChoice, sticky: str) -> list[ServedAdapter]:
        count = len(choice.members)
        tasks = [asyncio.ensure_future(self._member(choice, i, sticky)) for i in range(count)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _member(self, choice: MergedChoice, index: int, sticky: str) -> ServedAdapter:
        member = choice.members[index]
        try:
            return await self.resolve(member, sticky)
        except AdapterError as error:
            message = f"`merged_adapters.ids[{index}]` ({member.adapter_id}): {error.message}"
            raise AdapterError(
                error.code, message, error.violations, error.retry_after_s
            ) from error

    def forget(self, choice: AdapterChoice | MergedChoice | None) -> None:
        """Drop the remembered meaning, which was wrong: the next request asks anew.

        A registration that means one content goes on meaning that content; its operator sees the
        error.
        """
        if choice is None:
            return
        if isinstance(choice, MergedChoice):
            for member in choice.members:
                self.forget(member)
            return
        alias = self.rules.registration(choice)
        if alias is not None and not alias.in_service:
            return
        if alias is not None and alias.state == "ready":
            problem = "a worker could not fetch its content again; refresh it if it has changed"
            self._note_problem(alias, problem)
            return
        ref, token = self.rules.target(choice)
        for base in {"", choice.base}:
            self._outcomes.pop(_Key(ref, _fingerprint(token), base), None)

    def names(self) -> dict[str, str]:
        """Digest -> what it was last resolved from, for people."""
        return {
            outcome.manifest.digest: _name(outcome.origin)
            for outcome in self._outcomes.values()
            if outcome.manifest is not None and outcome.origin is not None
        }

    async def fetch(self, ref: AdapterRef, token: Secret | None) -> Content:
        """The present content of a reference, admitted by some worker. Raises AdapterError."""
        if ref.source == "alias":
            raise AdapterError("invalid", f"the adapters file does not say what {ref.name!r} means")
        self.rules.check_owner(ref)
        outcome = await self._fetch(_Key(ref, "", ""), token)
        if outcome.error is not None:
            raise outcome.error
        assert isinstance(outcome.origin, AdapterRef)
        assert outcome.manifest is not None
        return Content(outcome.origin, outcome.manifest, outcome.base)

    def _served(self, choice: AdapterChoice, alias: Registration, sticky: str) -> ServedAdapter:
        content = self.rules.content(choice, alias, sticky)
        rollout = "" if alias.rollout is None else alias.rollout.id
        return ServedAdapter(
            adapter_id=choice.adapter_id,
            origin=content.ref,
            token=self.rules.credential(alias),
            manifest=content.manifest,
            alias=alias.key,
            rollout=rollout,
            tool_format=alias.tool_format,
            base=content.base,
        )

    async def _resolve_once(self, key: _Key, token: Secret | None) -> _Outcome:
        if key not in self._resolving and len(self._resolving) >= MAX_RESOLVING:
            raise AdapterError("unavailable", "too many adapters are being resolved", (), 2.0)
        return await self._resolving.run(key, lambda: self._settle(key, token))

    async def _settle(self, key: _Key, token: Secret | None) -> _Outcome:
        outcome = await self._fetch(key, token)
        # A passing fault is shared with those who waited for it, and with nobody else.
        if outcome.error is None or outcome.error.code != "unavailable":
            self._outcomes[key] = outcome
        return outcome

    async def _fetch(self, key: _Key, token: Secret | None) -> _Outcome:
        origin = key.origin
        try:
            async with asyncio.timeout(self.rules.timeout_s):
                authorised = self._clock()
                if not isinstance(origin, Merge):
                    origin = await self._pin(origin, token)
                manifest, base = await self._load(origin, token, key.base)
                if not isinstance(origin, Merge) and self._is_stale(authorised):
                    authorised = self._clock()
                    await self._pin(origin, token)
        except AdapterError as error:
            return _Outcome(self._clock() + _NEGATIVE_TTL_S, error=error)
        except TimeoutError:
            late = f"the adapter was not ready within {self.rules.timeout_s:g} s"
            return _Outcome(self._clock(), error=AdapterError("unavailable", late, (), 5.0))
        return _Outcome(authorised + self.rules.ttl_s, origin, manifest, base=base)

    def _is_stale(self, authorised: float) -> bool:
        """Whether a caller's access must be proved once more: what it waited for took so long."""
        return self._clock() - authorised > MAX_ADAPTER_TTL_S


def _spelled(choice: AdapterChoice) -> str:
    """The registered name that the caller may mean, with the version that follows it."""
    is_alias = choice.ref.source == "alias"
    return format_ref(choice.ref).removeprefix("alias:") if is_alias else choice.adapter_id


def _name(origin: Origin) -> str:
    """The name of an origin, without the commit that a reference was pinned to."""
    if isinstance(origin, Merge):
        return f"merge of {len(origin.members)}"
    return format_ref(msgspec.structs.replace(origin, revision=None))


def _fingerprint(token: Secret | None) -> str:
    return "" if token is None else hashlib.sha256(token.encode()).hexdigest()


def _copy(error: AdapterError) -> AdapterError:
    """A fresh exception: one that is raised for many callers would gather all their tracebacks."""
    return AdapterError(error.code, error.message, error.violations, error.retry_after_s)
