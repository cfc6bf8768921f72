"""A caller's key: its tenant, the names that its patterns open, and its end; and the operator's
file of keys. Pure.

Only the SHA-256 of a key is kept. That is enough for what has the entropy of a key (32 random
bytes), where a slow hash for passwords would only slow every request.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loraplex.adapters.ref import format_ref
from loraplex.router.api.request.body import field_fault
from loraplex.router.call import AdapterChoice, MergedChoice, RequestError
from loraplex.router.policy.quota import Amount, Limits, Subject
from loraplex.server.protocol import BACKGROUND_PRIORITY

KEY_PREFIX = "lpx_"
MAX_MODELS = 256
DEFAULT_TENANT = "default"

# Of tenants, and of keys' ids: they stand in paths and in the store's keys.
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Label = Annotated[str, Meta(max_length=200)]
ModelPattern = Annotated[str, Meta(min_length=1, max_length=512)]
Models = Annotated[tuple[ModelPattern, ...], Meta(max_length=MAX_MODELS)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
KeyOrigin = Literal["api", "file"]
# Bands are strict: what waits in one goes before all that waits in the next.
Priority = Literal["high", "normal", "low"]
# What a key may do beside asking for answers.
Right = Literal["upload"]
Weight = Annotated[float, Meta(ge=0.01, le=100)]
_BANDS: dict[Priority, int] = {"high": -1, "normal": 0, "low": 1}
# Behind all others, whatever a body says of its own priority.
_BATCH_BAND = 2 * BACKGROUND_PRIORITY

MAX_FILE_BYTES = 16 << 20

# The name by which a choice is registered, if it is.
Registered = Callable[[AdapterChoice], str | None]


class ApiKey(msgspec.Struct, frozen=True):
    """An API key, without its secret. digest: SHA-256 of the key, in hex. Times are Unix seconds.

    models: patterns (`*`, `?`, `[…]`) of the names that it opens, as `names_of` spells them.
    priority: of its requests; None = its tenant's. previous: the digest before a rotation, good
    until `previous_until`. rights: what else its holder may do, with names of the tenant.
    """

    id: Word
    tenant: Word
    digest: Digest
    label: Label = ""
    models: Models = ("*",)
    limits: Limits = Limits()
    expires_at: int | None = None
    blocked: bool = False
    created_at: int = 0
    previous: Digest | None = None
    previous_until: int = 0
    origin: KeyOrigin = "api"
    priority: Priority | None = None
    rights: tuple[Right, ...] = ()


class Tenant(msgspec.Struct, frozen=True):
    """A tenant and its limits. limits: of all its keys together. weight: of its share of the fleet,
    when others want it too.

    priority: of requests whose key says none. files, file_bytes: what it may store; None = as the
    router's options say. upload_bytes: of kept versions of its adapters; None = the same.
    """

    name: Word
    limits: Limits = Limits()
    weight: Weight = 1.0
    priority: Priority = "normal"
    files: Amount | None = None
    file_bytes: Annotated[int, Meta(ge=1, le=2**50)] | None = None
    upload_bytes: Annotated[int, Meta(ge=1, le=2**50)] | None = None


class Caller(msgspec.Struct, frozen=True):
    """The party that asks. key: None where no key is needed; then all is open.

    owner: the key's tenant. is_batch: the request is a line of a batch.
    """

    key: ApiKey | None = None
    owner: Tenant = Tenant("")
    is_batch: bool = False

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.tenant

    @property
    def weight(self) -> float:
        return self.owner.weight

    @property
    def priority(self) -> int:
        """The priority of a caller's requests; lower goes first."""
        own = None if self.key is None else self.key.priority
        return _BANDS[own or self.owner.priority] + (_BATCH_BAND if self.is_batch else 0)

    @property
    def key_id(self) -> str:
        return "" if self.key is None else self.key.id

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Subjects whose quotas the requests take from; none for a caller without limits."""
        if self.key is None:
            return ()
        both = (
            Subject(f"key:{self.key.id}", self.key.limits),
            Subject(f"tenant:{self.key.tenant}", self.owner.limits),
        )
        return tuple(subject for subject in both if has_limits(subject.limits))

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether one of these names, all of the same thing, is opened."""
        if self.key is None:
            return True
        patterns = self.key.models
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


NOBODY = Caller()


def check_key(key: ApiKey | None, digest: str, now: float) -> ApiKey:
    """Checks that the key with this digest is good now. Raises RequestError (unauthorized)."""
    if key is None:
        raise RequestError("unauthorized", "no such key: it is wrong, or was deleted")
    if digest != key.digest and now >= key.previous_until:
        raise RequestError("unauthorized", "this key was replaced by another")
    if key.blocked:
        raise RequestError("unauthorized", "this key is blocked")
    if key.expires_at is not None and now >= key.expires_at:
        raise RequestError("unauthorized", "this key has expired")
    return key


def digests_of(key: ApiKey) -> tuple[str, ...]:
    """The digests by which a key may be found."""
    return (key.digest,) if key.previous is None else (key.digest, key.previous)


def has_limits(limits: Limits) -> bool:
    return (
        limits.requests_per_minute is not None
        or limits.concurrency is not None
        or counts_tokens(limits)
    )


def counts_tokens(limits: Limits) -> bool:
    return limits.tokens_per_minute is not None or limits.budget_tokens is not None


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key as it is written. sha256: of the key, in hex; `loraplex key generate` prints both."""

    id: Word
    sha256: Digest
    tenant: Word = DEFAULT_TENANT
    label: Label = ""
    models: Models = ("*",)
    limits: Limits = Limits()
    priority: Priority | None = None
    rights: tuple[Right, ...] = ()
    expires_at: datetime | None = None
    blocked: bool = False


class TenantEntry(Tenant, frozen=True, forbid_unknown_fields=True):
    """A tenant as it is written."""


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operator's file of keys and tenants.

    tenants:
      - name: acme
        limits: {tokens_per_minute: 100000}
        weight: 2
        priority: high
    keys:
      - id: acme-app
        tenant: acme
        sha256: 9a442df61988e574d8e08ca75d75d4d139b14dd20c4057766e77cac4ee43e90e
        models: ["sql", "hub:acme/*"]
        expires_at: 2030-01-01T00:00:00Z
    """

    keys: tuple[KeyEntry, ...] = ()
    tenants: tuple[TenantEntry, ...] = ()


class KeysFileError(Exception):
    """The file cannot be used; str() says why."""


def read_keys(data: bytes) -> tuple[list[ApiKey], list[Tenant]]:
    """Reads keys and tenants from YAML 1.1, of which JSON is a part. All of it or nothing. Raises
    KeysFileError."""
    if len(data) > MAX_FILE_BYTES:
        raise KeysFileError(f"it may have at most {MAX_FILE_BYTES} bytes")
    try:
        file = msgspec.yaml.decode(data, type=KeysFile)
    except msgspec.ValidationError as error:
        raise KeysFileError(str(field_fault(error, KeysFile))) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise KeysFileError(" ".join(str(error).split())) from None
    for what, words in (
        ("id", [key.id for key in file.keys]),
        ("sha256", [key.sha256 for key in file.keys]),
        ("tenant", [tenant.name for tenant in file.tenants]),
    ):
        if len(set(words)) < len(words):
            raise KeysFileError(f"a {what} is there twice")
    return [_key(entry) for entry in file.keys], [_tenant(entry) for entry in file.tenants]


def _tenant(entry: TenantEntry) -> Tenant:
    return Tenant(**msgspec.structs.asdict(entry))


def _key(entry: KeyEntry) -> ApiKey:
    expires_at = entry.expires_at
    if expires_at is not None and expires_at.tzinfo is None:
        raise KeysFileError(f"key {entry.id}: expires_at needs a time zone, such as Z")
    return ApiKey(
        id=entry.id,
        tenant=entry.tenant,
        digest=entry.sha256,
        label=entry.label,
        models=entry.models,
        limits=entry.limits,
        priority=entry.priority,
        rights=entry.rights,
        expires_at=None if expires_at is None else int(expires_at.timestamp()),
        blocked=entry.blocked,
        origin="file",
    )


def names_of(choice: AdapterChoice, registered: Registered, base: str = "") -> tuple[str, ...]:
    """Names by which keys may open an adapter: a registered one's name, or a reference's full
    spelling, with and without @rev. base: see `with_base`.
    """
    name = registered(choice)
    if name is not None:
        return with_base((name,), base)
    if choice.ref.source == "alias":
        return with_base((choice.ref.name,), base)
    full = format_ref(choice.ref)
    return with_base((full, full.partition("@")[0]) if choice.ref.revision else (full,), base)


def with_base(names: tuple[str, ...], base: str) -> tuple[str, ...]:
    """An adapter's names, also as `base:adapter`. base: "" = it is the only one, or not known."""
    return (*names, *(f"{base}:{name}" for name in names)) if base else names


def opens(caller: Caller, name: str, base: str | None) -> bool:
    """Whether a caller's key opens a registered adapter. base: see `with_base`; None = unknown."""
    return caller.may_use(with_base((name,), base or ""))


def check_scope(
    caller: Caller,
    choice: AdapterChoice | MergedChoice | None,
    base_names: Sequence[str],
    registered: Registered,
    param: str,
    base: str = "",
) -> None:
    """Checks that a caller may use what a request names. base: see `with_base`. Raises RequestError
    (forbidden) for what the caller's key does not open.

    The words alone decide: the answer does not show whether there is such an adapter.
    """
    if choice is None:
        if not caller.may_use(base_names):
            raise RequestError("forbidden", "this key does not open the base model", param=param)
        return
    members = choice.members if isinstance(choice, MergedChoice) else (choice,)
    for member in members:
        if not caller.may_use(names_of(member, registered, base)):
            message = f"this key does not open {member.adapter_id[:200]!r}"
            raise RequestError("forbidden", message, param=param)
