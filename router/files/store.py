"""Tenants' files below `--files-dir`. Routers may share it. Every method may wait for the disk.

tenants/<tenant>/files/<id>.json     what is known of a file; it is there once the content is
                      /<id>.jsonl    the content
                      /<id>.part     an upload under way
tenants/<tenant>/batches/            see `loraplex.router.batches.folder`
                /responses/<name>    values, as of a shelf
                /responses.lock      of whoever replaces one
"""

import asyncio
import contextlib
import errno
import fcntl
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from loraplex.adapters.common.disk import sync_path
from loraplex.router.api.files_and_batches import FileObject
from loraplex.router.call import RequestError
from loraplex.router.files.stored_file import (
    FILE_ID,
    StorageLimits,
    StoredAmount,
    ids_of,
    is_id,
)
from loraplex.router.policy.batch_limits import ResponsesLimits

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RETRY_S = 30.0
# Of their own: a slow disk must not keep threads from those who need none of it.
_THREADS = ThreadPoolExecutor(8, "files")

P = ParamSpec("P")
T = TypeVar("T")

_NOBODY = "_"  # no tenant's name begins so
_NOTE, _CONTENT, _PART = ".json", ".jsonl", ".part"
# What a router that died has left behind.
_LEFT_S = 86400.0
# Some programs remove a file system's last space at their peril.
_SPARE_BYTES = 64 << 20
_read_note = msgspec.json.Decoder(FileObject).decode


async def off_loop(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` in a thread: a disk may be slow. Raises RequestError (unavailable) for one that
    is full or broken, and what `work` raises."""
    try:
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
    except OSError as error:
        logger.error("--files-dir cannot be used: %s", error)
        why = "is full" if error.errno in _FULL else "cannot be used"
        message = f"the disk of --files-dir {why}; try again later"
        raise RequestError("unavailable", message, retry_after_s=_RETRY_S) from error


def write_whole(path: Path, content: bytes, durable: bool = True) -> None:
    """Replaces a file's content in one step. durable: a crash undoes nothing. Raises OSError."""
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        written.write_bytes(content)
        if durable:
            sync_path(written)
        written.rename(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(path.parent)


def read_if_there(path: Path) -> bytes | None:
    """Reads a file; None where there is none. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def names_in(folder: Path) -> list[str]:
    """The names in a folder; empty when the folder is not there. Raises OSError."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


class FileStore:
    """Keeps tenants' files on disk. Raises OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tenants = root / "tenants"

    def folder(self, tenant: str, kind: str) -> Path:
        """The folder of one kind of a tenant's things. kind: files, batches or responses."""
        return self._tenants / (tenant or _NOBODY) / kind

    def tenants(self) -> list[str]:
        return ["" if name == _NOBODY else name for name in names_in(self._tenants)]

    def ids(self, tenant: str) -> list[str]:
        return ids_of(names_in(self._folder(tenant)), FILE_ID, _NOTE)

    def find(self, tenant: str, file_id: str) -> FileObject | None:
        if not is_id(FILE_ID, file_id):
            return None
        note = read_if_there(self._folder(tenant) / f"{file_id}{_NOTE}")
        return None if note is None else _read_note(note)

    def get(self, tenant: str, file_id: str, param: str | None = None) -> FileObject:
        """A tenant's file. Raises RequestError (file_not_found), also once it has expired."""
        found = self.find(tenant, file_id)
        if found is None or found.has_expired(time.time()):
            raise RequestError("file_not_found", f"no file {file_id[:80]!r}", param=param)
        return found

    def content(self, tenant: str, file_id: str) -> Path:
        return self._folder(tenant) / f"{file_id}{_CONTENT}"

    def stored(self, tenant: str) -> StoredAmount:
        """Measures a tenant's files, with uploads under way, and what batches write."""
        files = nbytes = 0
        for kind in ("files", "batches"):
            folder = self.folder(tenant, kind)
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    is_note = entry.name.endswith(_NOTE)
                    files += is_note and kind == "files"
                    with contextlib.suppress(FileNotFoundError):
                        nbytes += 0 if is_note else entry.stat().st_size
        return StoredAmount(files, nbytes)

    def check_room(self, tenant: str, limits: StorageLimits, files: int, nbytes: int) -> None:
        """Checks that so many more files and bytes may be stored. Raises RequestError."""
        limits.check(self.stored(tenant), files, nbytes)
        space = os.statvfs(self._tenants)
        if space.f_bavail * space.f_frsize < nbytes + _SPARE_BYTES:
            raise RequestError("unavailable", "the disk of --files-dir is full; try again later")

    def begin(self, tenant: str, file_id: str) -> Path:
        """Returns the path that an upload is written to."""
        self._folder(tenant).mkdir(parents=True, exist_ok=True)
        return self._folder(tenant) / f"{file_id}{_PART}"

    def keep(self, tenant: str, written: Path, file: FileObject) -> None:
        """Make the written bytes the content of a file. A step that a crash broke off may have done
        so already."""
        content = self.content(tenant, file.id)
        content.parent.mkdir(parents=True, exist_ok=True)
        if written.exists():
            sync_path(written)
            written.rename(content)
        self._note(tenant, file)

    def _note(self, tenant: str, file: FileObject) -> None:
        write_whole(self._folder(tenant) / f"{file.id}{_NOTE}", msgspec.json.encode(file))

    def delete(self, tenant: str, file_id: str) -> None:
        for ending in (_NOTE, _CONTENT):
            (self._folder(tenant) / f"{file_id}{ending}").unlink(missing_ok=True)

    def sweep(self, tenant: str, in_use: Collection[str], now: float) -> int:
        """Removes what has expired, and what dead routers left. in_use: ids of files that stay.
        Returns how many files have gone."""
        gone = 0
        for file_id in self.ids(tenant):
            file = self.find(tenant, file_id)
            if file is not None and file.has_expired(now) and file_id not in in_use:
                self.delete(tenant, file_id)
                gone += 1
        for name in names_in(self._folder(tenant)):
            path = self._folder(tenant) / name
            is_left = name.endswith((_PART, TEMPORARY)) or (
                name.endswith(_CONTENT) and not path.with_suffix(_NOTE).exists()
            )
            with contextlib.suppress(FileNotFoundError):
                if is_left and path.stat().st_mtime < now - _LEFT_S:
                    path.unlink()
        return gone

    def _folder(self, tenant: str) -> Path:
        return self.folder(tenant, "files")


def folder_id(root: Path) -> str:
    """The id of a folder, whatever it is called here: routers that share it read the same. A folder
    without an id gets one. Raises OSError."""
    (root / "tenants").mkdir(parents=True, exist_ok=True)
    path = root / "id"
    said = read_if_there(path)
    if said is None:
        made = root / f".id.{secrets.token_hex(4)}{TEMPORARY}"
        made.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(made, path)  # the first one wins
        made.unlink()
        said = path.read_bytes()
    return said.decode()


class DiskShelf:
    """A Shelf on disk. Raises RequestError (unavailable) of the disk."""

    def __init__(self, files: FileStore) -> None:
        self._files = files

    async def shelved(self, tenant: str, name: str) -> bytes:
        path = self._files.folder(tenant, "responses") / name
        return await off_loop(read_if_there, path) or b""

    async def shelve(
        self, tenant: str, name: str, old: bytes, new: bytes, limits: ResponsesLimits, least: str
    ) -> bool:
        path = self._files.folder(tenant, "responses") / name

        def replace() -> bool:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.parent.with_suffix(".lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if (read_if_there(path) or b"") != old:
                    return False
                if new:
                    write_whole(path, new)
                else:
                    path.unlink(missing_ok=True)
            self._trim(tenant, limits, least, name)
            return True

        return await off_loop(replace)

    def sweep(self, limits: ResponsesLimits, least: str) -> None:
        for tenant in self._files.tenants():
            self._trim(tenant, limits, least)

    def _trim(self, tenant: str, limits: ResponsesLimits, least: str, stays: str = "") -> None:
        folder, count, nbytes = self._files.folder(tenant, "responses"), 0, 0
        for name in sorted(names_in(folder), reverse=True):
            path = folder / name
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                if name.endswith(TEMPORARY):  # it is being written, or its router died
                    goes = about.st_mtime < time.time() - limits.keep_s
                else:
                    count, nbytes = count + 1, nbytes + about.st_size
                    fits = count <= limits.tenant_count and nbytes <= limits.tenant_bytes
                    goes = name != stays and not (fits and name >= least)
                if goes:
                    path.unlink()
