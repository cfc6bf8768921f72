"""The operator's file of keys and tenants. Pure.

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

from datetime import datetime

import msgspec

from loraplex.router.api.request.body import field_fault
from loraplex.router.policy.quota import Limits
from loraplex.router.tenancy.keys import (
    DEFAULT_TENANT,
    ApiKey,
    Digest,
    Label,
    Models,
    Priority,
    Right,
    Tenant,
    Word,
)

MAX_FILE_BYTES = 16 << 20


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
