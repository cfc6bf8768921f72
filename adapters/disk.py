"""Files that appear whole or not at all, private staging folders, and a bound on disk use."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adapters.errors import AdapterError

_RETRY_S = 30.0
_ATTEMPTS = 8
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_errors() -> Iterator[None]:
    """A disk that is full, read-only or broken is `unavailable`, not a fault of the adapter."""
    try:
        yield
    except OSError as error:
        reason = "has no space left" if error.errno in _FULL else "cannot be used"
        message = f"the disk of the adapter store {reason}"
        raise AdapterError("unavailable", message, (), _RETRY_S) from error


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A private folder, removed at the end; its lock tells other processes that it is in use."""
    folder, lock = _locked_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Another process may take the folder for a stale one before it is locked; then once more."""
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _lock(lock) and folder.exists():
                return folder, lock
            os.close(lock)
    raise OSError(errno.EBUSY, "no staging folder could be locked")


def remove_stale(parent: Path) -> None:
    """Removes staging folders whose process is gone."""
    for entry in entries_of(parent):
        with suppress(OSError):
            lock = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _lock(lock):
                    shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(lock)


def publish_folder(staged: Path, target: Path) -> None:
    """Makes a staged folder appear as `target`, read-only and durable; the first one wins."""
    for path in staged.iterdir():
        path.chmod(0o444)
        _sync(path)
    _sync(staged)
    try:
        staged.rename(target)
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
    _sync(target.parent)


def publish_file(staged: Path, target: Path) -> None:
    """Makes a staged file appear as `target`, read-only and durable."""
    staged.chmod(0o444)
    _sync(staged)
    staged.rename(target)
    _sync(target.parent)


def mark_used(path: Path) -> None:
    """Notes the use for `keep_within`."""
    with suppress(OSError):
        os.utime(path)


def keep_within(max_bytes: int, folders: Iterable[Path], keep: Path) -> None:
    """Removes entries of `folders`, least recently used first, until they fit. Never `keep`.

    A reader that has such a file open keeps it until it closes it.
    """
    entries: list[tuple[float, int, Path]] = []
    for folder in folders:
        for entry in entries_of(folder):
            with suppress(OSError):
                entries.append((entry.stat().st_mtime, _size(Path(entry.path)), Path(entry.path)))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= max_bytes:
            return
        if path != keep:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(True)
            total -= size


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(entry.stat().st_size for entry in entries_of(path))


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
