"""Watched folders: which sub-folders are adapters, under which names, and what must be done. Pure.

With `--watch-folder /srv/loras` the files in /srv/loras/run-1/ are the adapter `run-1`.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import MLX_FILE, is_unsafe, weight_files
from loraplex.adapters.ref import AdapterRef, local_name, name_fault, path_of_local
from loraplex.router.names.registration import DECLARED_BY, Registration, RegistrationRequest
from loraplex.router.names.served import OwnedName

BY = "a watched folder"
# Beginnings of names under which files are written before they get their own.
UNFINISHED = (".", "tmp")

# A sub-folder's files that count, with what changes whenever one is written.
Stamp = tuple[tuple[object, ...], ...]
# Paths of sub-folders; None = the sub-folder is not a whole adapter, or not yet.
Look = Mapping[str, Stamp | None]


class FolderEntry(msgspec.Struct, frozen=True):
    """A name that a sub-folder gives. stamp: of what the name is to mean."""

    ref: AdapterRef
    stamp: Stamp


class FolderChanges(msgspec.Struct, frozen=True):
    """Changes that make the registrations as the sub-folders say. errors: of names that are left as
    they are. stamps: those of all names that are the folders'.
    """

    register: tuple[RegistrationRequest, ...]
    delete: tuple[OwnedName, ...]
    errors: dict[OwnedName, str]
    stamps: dict[OwnedName, Stamp]


def is_whole(files: Collection[str]) -> bool:
    """Whether the files can be judged: a config and weights, be they of a refused kind."""
    has_weights = weight_files(files) or any(is_unsafe(name) or name == MLX_FILE for name in files)
    return CONFIG_FILE in files and bool(has_weights)


def settle(settled: Mapping[str, Stamp], before: Look, now: Look) -> dict[str, Stamp]:
    """The sub-folders that count after two looks: what one look finds may still be being written.

    A sub-folder that is no whole adapter any more counts as it was, until it is gone.
    """
    after = dict(settled)
    for path, stamp in now.items():
        if stamp is not None and stamp == before.get(path):
            after[path] = stamp
    for path in settled:
        if path not in now and path not in before:
            del after[path]
    return after


def name_folders(
    settled: Iterable[Mapping[str, Stamp]],
) -> tuple[dict[OwnedName, FolderEntry], dict[OwnedName, str]]:
    """The names that sub-folders give, and the problems of those that give none. settled: of each
    watched folder; of two sub-folders of one name the earlier folder's has it.
    """
    wanted: dict[OwnedName, FolderEntry] = {}
    errors: dict[OwnedName, str] = {}
    for path, stamp in (one for folder in settled for one in sorted(folder.items())):
        name = OwnedName(path.rpartition("/")[2])
        fault = _fault(name.name)
        if fault is None and name in wanted:
            fault = f"{path_of_local(wanted[name].ref.name)} has the name already"
        if fault is None:
            wanted[name] = FolderEntry(AdapterRef("local", local_name(path)), stamp)
        else:
            errors[OwnedName(ascii(path)[1:-1])] = fault
    return wanted, errors


def plan(
    wanted: Mapping[OwnedName, FolderEntry],
    registrations: Iterable[Registration],
    tried: Mapping[OwnedName, Stamp],
    failed: Mapping[OwnedName, str],
    is_due: bool,
) -> FolderChanges:
    """Plans the changes from what is registered to what the sub-folders say. A name that is
    registered or declared elsewhere stays as it is.

    tried: by name. failed: problems by name; is_due: they are to be tried once more.
    """
    present = {registration.key: registration for registration in registrations}
    register: list[RegistrationRequest] = []
    errors: dict[OwnedName, str] = {}
    stamps: dict[OwnedName, Stamp] = {}
    for name, declared in wanted.items():
        there = present.get(name)
        if there is not None and there.origin != "folder":
            errors[name] = f"the name is taken by {DECLARED_BY[there.origin]}, which comes first"
            continue
        stamps[name] = declared.stamp
        is_new = tried.get(name) != declared.stamp
        if name in failed and not is_new and not is_due:
            errors[name] = failed[name]
        elif name in failed or is_new or there is None or there.ref != declared.ref:
            register.append(RegistrationRequest(name, declared.ref, "folder", by=BY))
    delete = (r.key for r in present.values() if r.origin == "folder" and r.key not in wanted)
    return FolderChanges(tuple(register), tuple(delete), errors, stamps)


def _fault(name: str) -> str | None:
    """Why a sub-folder's name is no adapter's, or None."""
    if name.startswith(UNFINISHED):
        return "what begins with '.' or 'tmp' is not served: rename the folder when it is whole"
    return name_fault(name)
