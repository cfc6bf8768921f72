"""Private folders for what is being written, and for downloads that can go on."""

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loraplex.adapters.common.disk import boot_id, entries_of, release, remove_unused, stored_bytes
from loraplex.adapters.errors import AdapterChanged, AdapterError

# Of downloads that broke off, together.
MAX_KEPT = 16
MAX_KEPT_BYTES = 16 << 30
KEPT_S = 86_400.0
_ATTEMPTS = 8
_KEPT = "resume-"


@contextmanager
def unfinished_folder(parent: Path) -> Iterator[Path]:
    """A private folder, removed at the end; its lock shows other processes that it is in use."""
    folder, lock = _new_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def resumable_folder(parent: Path, key: str) -> Iterator[Path]:
    """Opens a private folder that keeps what an earlier download for `key` left.

    key: names the content exactly. The folder is left when AdapterError `unavailable` ends it, and
    when the process dies. A caller who finds it in use gets a fresh one.
    """
    folder = parent / f"{_KEPT}{hashlib.sha256(f'{boot_id()} {key}'.encode()).hexdigest()[:40]}"
    lock = _take(folder)
    if lock is None:
        with unfinished_folder(parent) as fresh:
            yield fresh
        return
    keep = False
    try:
        yield folder
    except AdapterError as error:
        keep = error.code == "unavailable" and not isinstance(error, AdapterChanged)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        if keep:
            remove_stale(parent)


def remove_stale(parent: Path) -> None:
    """Removes what dead processes left, but for downloads that can go on: few, and not for long."""
    kept: list[tuple[float, Path]] = []
    for entry in entries_of(parent):
        path = Path(entry.path)
        with suppress(OSError):
            used = entry.stat().st_mtime
            if entry.name.startswith(_KEPT) and 0 <= time.time() - used < KEPT_S:
                kept.append((used, path))
            else:
                remove_unused(path)
    for _, path in sorted(kept, reverse=True)[MAX_KEPT:]:
        with suppress(OSError):
            remove_unused(path)
    release(stored_bytes((parent,)) - MAX_KEPT_BYTES, (parent,))


def _new_folder(parent: Path) -> tuple[Path, int]:
    """Makes a locked folder. A process may remove it before the lock: then it is made again."""
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(dir=parent))
        lock = _lock(folder)
        if lock is not None:
            return folder, lock
    raise OSError(errno.EBUSY, "no private folder could be locked")


def _take(folder: Path) -> int | None:
    """The lock of a folder that is made if need be; None when another holds it."""
    for _ in range(_ATTEMPTS):
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = _lock(folder)
        if lock is not None:
            os.utime(folder)
            return lock
        if folder.exists():
            return None
    return None


def _lock(folder: Path) -> int | None:
    """Locks a folder; None = another holds it, or it was removed or replaced meanwhile."""
    with suppress(FileNotFoundError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), folder.stat()):
                return fd
        except OSError:
            pass
        os.close(fd)
    return None
