"""The operator's file of adapters: what it says, and what must be done to make it true. Pure.

adapters:
  - name: sql
    ref: hub:org/sql-lora@main
    pin: true
    versions: [{reference: "hub:org/sql-lora@next", weight: 5}]
    tenant: acme
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef, is_name
from loraplex.router.api.admin.adapters import (
    Name,
    Versions,
    check_name,
    format_named,
    parse_target,
    rollout_request,
)
from loraplex.router.api.request.body import field_fault, require
from loraplex.router.call import RequestError
from loraplex.router.names.registration import Registration, RegistrationRequest, RolloutRequest
from loraplex.router.names.rollout_moves import split
from loraplex.router.names.served import OwnedName
from loraplex.router.policy.rollout import Declared, Guards
from loraplex.router.tenancy.keys import Word

BY = "the adapters file"
MAX_FILE_BYTES = 4 << 20
# Where errors of the file as a whole stand among those of its entries.
WHOLE = OwnedName("")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapter as it is written. tenant: whose name it is; absent = the fleet's. tool_format: in
    which it writes calls; absent = by its chat template, or the base's."""

    name: Name
    ref: str
    pin: bool = False
    versions: Versions | None = None
    guards: Guards | None | msgspec.UnsetType = msgspec.UNSET
    tenant: Word | None = None
    tool_format: str | None = None


_KNOWN = ", ".join(FileEntry.__struct_fields__)


class NameEntry(msgspec.Struct, frozen=True):
    """An entry that can be understood. rollout: None = whether there is one is not the file's."""

    ref: AdapterRef
    pin: bool
    rollout: Declared | None = None
    tool_format: str = ""


class FileContents(msgspec.Struct, frozen=True):
    """The adapters file. errors: by name, or WHOLE; what they are about stays as it is."""

    wanted: dict[OwnedName, NameEntry]
    errors: dict[OwnedName, str]

    @property
    def names(self) -> frozenset[OwnedName]:
        """Names that the file mentions."""
        return frozenset(self.wanted.keys() | self.errors.keys())

    @property
    def is_readable(self) -> bool:
        return WHOLE not in self.errors

    @property
    def not_understood(self) -> dict[RegistrationRequest, str]:
        """Names that callers may ask for and whose entries mean nothing, with the reason."""
        return {
            RegistrationRequest(name, AdapterRef("alias", name.name), "file"): why
            for name, why in self.errors.items()
            if name not in self.wanted and is_name(name.name) and is_name(name.tenant or name.name)
        }


class FileChanges(msgspec.Struct, frozen=True):
    """Changes that make the registrations as the file says.

    errors: entries that contradict a declaration of --adapter.
    """

    register: tuple[RegistrationRequest, ...] = ()
    pin: tuple[OwnedName, ...] = ()
    unpin: tuple[OwnedName, ...] = ()
    delete: tuple[OwnedName, ...] = ()
    errors: dict[OwnedName, str] = {}


def unreadable(why: str) -> FileContents:
    return FileContents({}, {WHOLE: why})


def read(data: bytes, default_source: str) -> FileContents:
    """Reads the adapters file from YAML 1.1, of which JSON is a part."""
    if len(data) > MAX_FILE_BYTES:
        return unreadable(f"it may have at most {MAX_FILE_BYTES} bytes")
    try:
        plain = msgspec.yaml.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        return unreadable(" ".join(str(error).split()))
    entries = plain.get("adapters") if isinstance(plain, dict) else None
    if not isinstance(plain, dict) or set(plain) != {"adapters"} or not isinstance(entries, list):
        return unreadable(f"expected one key, `adapters`, with a list of {_KNOWN}")
    wanted: dict[OwnedName, NameEntry] = {}
    errors: dict[OwnedName, str] = {}
    for number, entry in enumerate(entries, 1):
        name = _name_of(entry) or OwnedName(f"entry {number}")
        problem = (
            "it is there twice" if name in wanted else _read_entry(entry, wanted, default_source)
        )
        if problem is not None:
            errors[name] = problem
    return FileContents(wanted, errors)


def plan(contents: FileContents, registrations: Iterable[Registration]) -> FileChanges:
    """Plans the changes from what is registered to what the file says. What the file never named is
    left alone.

    It takes a name over that was registered through the API, or by a watched folder.
    """
    if not contents.is_readable:
        return FileChanges()
    present = {registration.key: registration for registration in registrations}
    register: list[RegistrationRequest] = []
    pin: list[OwnedName] = []
    unpin: list[OwnedName] = []
    errors: dict[OwnedName, str] = {}
    for name, wanted in contents.wanted.items():
        there = present.get(name)
        is_broken = there is not None and there.origin == "file" and there.state == "registered"
        if (
            there is None
            or there.origin in ("api", "folder")
            or is_broken
            or _is_new(there, wanted)
        ):
            replace = there is not None
            request = RegistrationRequest(name, wanted.ref, "file", wanted.pin, None, replace, BY)
            register.append(msgspec.structs.replace(request, tool_format=wanted.tool_format))
        elif there.ref != wanted.ref:
            errors[name] = "the name is declared with another reference, by --adapter"
        elif there.origin != "file" and there.pinned != wanted.pin:
            errors[name] = "whether it is pinned is left to --adapter, which declares it"
        elif there.origin != "file" and there.tool_format != wanted.tool_format:
            errors[name] = "it is declared by --adapter: `tool_format` needs a name that is not"
        elif there.origin != "file" and wanted.rollout is not None:
            errors[name] = "it is declared by --adapter: versions need a name that is not"
        elif there.origin == "file" and there.in_service and there.pinned != wanted.pin:
            (pin if wanted.pin else unpin).append(name)
    named = contents.names
    delete = [r.key for r in present.values() if r.origin == "file" and r.key not in named]
    return FileChanges(tuple(register), tuple(pin), tuple(unpin), tuple(delete), errors)


class RolloutPlan(msgspec.Struct, frozen=True):
    """Rollouts that the file changes. end: names whose rollouts it wants no more."""

    roll_out: dict[OwnedName, RolloutRequest]
    end: tuple[OwnedName, ...]


def plan_rollouts(contents: FileContents, registrations: Iterable[Registration]) -> RolloutPlan:
    """Changes of rollouts that are left once `plan` is carried out.

    A rollout that changed since the file was written, as by versions that went back, is left alone
    until the file says something else. Where the file says nothing, an operator's rollout is left
    alone.
    """
    requests: dict[OwnedName, RolloutRequest] = {}
    end: list[OwnedName] = []
    for registration in registrations:
        wanted = contents.wanted.get(registration.key)
        if wanted is None or registration.origin != "file" or registration.ref != wanted.ref:
            continue
        there = None if registration.rollout is None else registration.rollout.declared
        declared = wanted.rollout
        if there == declared:
            continue
        if declared is None:
            end.append(registration.key)
        else:
            request = RolloutRequest(declared.versions, declared.guards, BY, declared)
            requests[registration.key] = request
    return RolloutPlan(requests, tuple(end))


def _name_of(entry: Any) -> OwnedName | None:
    """Finds the name of an entry that may be wrong, as far as it is known."""
    fields = entry if isinstance(entry, Mapping) else {}
    name, tenant = (str(fields.get(field) or "")[:96] for field in ("name", "tenant"))
    return OwnedName(name, tenant) if name else None


def _read_entry(entry: Any, wanted: dict[OwnedName, NameEntry], default_source: str) -> str | None:
    try:
        typed = msgspec.convert(entry, FileEntry)
        check_name(typed.name, "name")
        tool_format = format_named(typed.tool_format) or ""
        ref = parse_target(typed.ref, "ref", default_source)
        rollout = _read_rollout(typed, ref, default_source)
    except msgspec.ValidationError as error:
        return str(field_fault(error, FileEntry))
    except RequestError as error:
        return error.message
    except AdapterError as error:
        return f"`versions`: {error.message}"
    wanted[OwnedName(typed.name, typed.tenant or "")] = NameEntry(
        ref, typed.pin, rollout, tool_format
    )
    return None


def _read_rollout(entry: FileEntry, ref: AdapterRef, default_source: str) -> Declared | None:
    """Reads the rollout of an entry; None if it has none. Raises RequestError, AdapterError."""
    if entry.versions is None:
        require(entry.guards is msgspec.UNSET, "they need `versions` beside them", "guards")
        return None
    request = rollout_request(entry.versions, entry.guards, default_source, BY)
    split([ref], request.versions)
    guards = Guards() if isinstance(request.guards, msgspec.UnsetType) else request.guards
    return Declared(request.versions, guards)


def _is_new(there: Registration, wanted: NameEntry) -> bool:
    said = (wanted.ref, wanted.tool_format)
    return there.origin == "file" and (there.ref, there.tool_format) != said
