"""Bodies and answers of `/v1/keys`, `/v1/usage` and `/v1/audit`. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loraplex.router.api.request.body import decode_body, require, whole_number
from loraplex.router.call import RequestError
from loraplex.router.policy.quota import Limits
from loraplex.router.tenancy.keys import (
    DEFAULT_TENANT,
    MAX_MODELS,
    ApiKey,
    KeyOrigin,
    Label,
    ModelPattern,
    Priority,
    Right,
    Word,
)
from loraplex.router.tenancy.records import AuditRecord
from loraplex.router.tenancy.usage import MAX_DAYS, UsageRecord, UsageRow

MAX_GRACE_S = 7 * 86400
MAX_LISTED = 1000

Seconds = Annotated[int, Meta(ge=1, le=2**33)]


class CreateKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request for a new key. id: made up if absent. expires_at: Unix seconds. models:
    patterns of names; absent = all. rights: what it opens beside answers.
    """

    id: Word | None = None
    tenant: Word = DEFAULT_TENANT
    label: Label = ""
    models: list[ModelPattern] | None = None
    limits: Limits = Limits()
    expires_at: Seconds | None = None
    priority: Priority | None = None
    rights: list[Right] = []


class ChangeKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to change a key. Absent fields stay. expires_at: null = never. priority:
    null = the tenant's.
    """

    label: Label | UnsetType = UNSET
    models: list[ModelPattern] | UnsetType = UNSET
    limits: Limits | UnsetType = UNSET
    expires_at: Seconds | None | UnsetType = UNSET
    priority: Priority | None | UnsetType = UNSET
    rights: list[Right] | UnsetType = UNSET


class RotateKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to replace a key by a new one. grace_s: how long the old key is
    good still.
    """

    grace_s: Annotated[int, Meta(ge=0, le=MAX_GRACE_S)] = 0


class KeyObject(msgspec.Struct, frozen=True):
    """A key without the key itself; times are Unix seconds."""

    id: str
    tenant: str
    label: str
    models: list[str]
    limits: Limits
    expires_at: int | None
    blocked: bool
    created_at: int
    origin: KeyOrigin
    priority: Priority | None
    rights: list[Right]
    object: Literal["key"] = "key"


class NewKeyObject(msgspec.Struct, frozen=True):
    """Answer that shows a new key. key: it is shown this once and kept nowhere. hints: what its
    maker may not expect.
    """

    key: str
    data: KeyObject
    object: Literal["new_key"] = "new_key"
    hints: tuple[str, ...] = ()


class KeyList(msgspec.Struct, frozen=True):
    data: list[KeyObject]
    object: Literal["list"] = "list"


class DeletedKey(msgspec.Struct, frozen=True):
    id: str
    deleted: Literal[True] = True
    object: Literal["key"] = "key"


class UsageList(msgspec.Struct, frozen=True):
    """Answer that lists the usage of some days. start, end: the days, both included, as YYYY-MM-DD
    in UTC. currency: of costs; null = nothing has a price.
    """

    start: str
    end: str
    data: list[UsageRow]
    currency: str | None = None
    object: Literal["list"] = "list"


class RecordList(msgspec.Struct, frozen=True):
    """Answer that lists requests, the newest first."""

    data: list[UsageRecord]
    object: Literal["list"] = "list"


class AuditList(msgspec.Struct, frozen=True):
    """Answer that lists operators' actions, the newest first."""

    data: list[AuditRecord]
    object: Literal["list"] = "list"


def parse_create(body: bytes, made_up: str, now: float) -> ApiKey:
    """Reads a request for a key, still without digest. now: Unix seconds. Raises RequestError."""
    wanted, _ = decode_body(body or b"{}", CreateKeyBody)
    is_over = wanted.expires_at is not None and wanted.expires_at <= now
    require(not is_over, "lies in the past: the key would never be good", "expires_at")
    return ApiKey(
        id=wanted.id or made_up,
        tenant=wanted.tenant,
        digest="",
        label=wanted.label,
        models=_models(wanted.models),
        limits=wanted.limits,
        expires_at=wanted.expires_at,
        priority=wanted.priority,
        rights=tuple(wanted.rights),
    )


def parse_change(body: bytes) -> dict[str, object]:
    """Fields of ApiKey. Raises RequestError."""
    wanted, _ = decode_body(body, ChangeKeyBody)
    changes = {name: getattr(wanted, name) for name in ChangeKeyBody.__struct_fields__}
    changes = {name: value for name, value in changes.items() if value is not UNSET}
    if "models" in changes:
        changes["models"] = _models(changes["models"])
    if "rights" in changes:
        changes["rights"] = tuple(wanted.rights or ())
    return changes


def parse_rotate(body: bytes) -> int:
    """Seconds of grace. Raises RequestError."""
    return decode_body(body, RotateKeyBody)[0].grace_s if body else 0


def parse_days(query: Mapping[str, str], today: int) -> tuple[int, int]:
    """Reads from the query the first and last day since 1970-01-01, both included; today if absent.
    Raises RequestError.
    """
    last = _day(query, "end", today)
    first = _day(query, "start", last)
    require(first <= last, "lies after `end`", "start")
    require(last - first < MAX_DAYS, f"expected at most {MAX_DAYS} days", "start")
    return first, last


def parse_count(query: Mapping[str, str], name: str = "limit", default: int = 100) -> int:
    """Reads from the query how many items to list. Raises RequestError."""
    return whole_number(query.get(name, str(default)), 1, MAX_LISTED, name)


def key_object(key: ApiKey) -> KeyObject:
    return msgspec.convert(key, KeyObject, from_attributes=True)


def _models(models: list[str] | None) -> tuple[str, ...]:
    if models is None:
        return ("*",)
    require(len(models) <= MAX_MODELS, f"expected at most {MAX_MODELS} patterns", "models")
    return tuple(models)


def _day(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        return int(msgspec.convert(f"{text}T00:00:00Z", datetime).timestamp() // 86400)
    except (msgspec.ValidationError, ValueError, OverflowError):
        message = f"`{name}`: expected YYYY-MM-DD, got {text[:40]!r}"
        raise RequestError("invalid", message, param=name) from None
