"""Files on disk: atomic appearance, locks on what is in use, removal by last use."""

import errno
import fcntl
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.errors import AdapterError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
log = logging.getLogger(__name__)

_RETRY_S = 30.0
_LOGGED_AGAIN_S = 600.0
# When each fault was last logged: by store and error number.
_logged_at: dict[tuple[Path, object], float] = {}
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FICLONE = 0x40049409  # of linux/fs.h


@contextmanager
def disk_errors(store: Path) -> Iterator[None]:
    """A disk that is full, read-only or broken is `unavailable`, not a fault of the adapter. store:
    what the log says of where it was."""
    try:
        yield
    except OSError as error:
        tell_of_disk(store, error, error.errno)
        reason = "has no space left" if error.errno in _FULL else "cannot be used"
        message = f"the disk of the adapter store {reason}"
        raise AdapterError("unavailable", message, (), _RETRY_S) from error


def tell_of_disk(store: Path, what: object, kind: object) -> None:
    """Logs a fault of the disk: each kind once in a while, as every request may meet it."""
    fault, now = (store, kind), time.monotonic()
    if now - _logged_at.get(fault, -math.inf) >= _LOGGED_AGAIN_S:
        _logged_at[fault] = now
        log.error("the adapter store in %s cannot use its disk: %s", store, what)


def publish_folder(written: Path, target: Path, durable: bool = True) -> None:
    """Makes a written folder appear as `target`, read-only; the first one wins.

    durable: whatever crashes then, it is there. Else some of its files may be torn by a crash.
    """
    for path in written.iterdir():
        path.chmod(0o444)
    if durable:
        sync_files(written)
        sync_path(written)
    try:
        written.rename(target)
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
    if durable:
        sync_path(target.parent)


def publish_file(written: Path, target: Path) -> None:
    """Makes a written file appear as `target`, read-only and durable."""
    written.chmod(0o444)
    sync_path(written)
    written.rename(target)
    sync_path(target.parent)


def sync_files(folder: Path) -> None:
    """Waits until the folder's files are on the disk; that they are in the folder may not be."""
    for path in folder.iterdir():
        sync_path(path)


def share_bytes(source: int, target: int) -> bool:
    """Gives an empty open file another's content where the file system lets both share it."""
    with suppress(OSError):
        fcntl.ioctl(target, _FICLONE, source)
        return True
    return False


def read_at(fd: int, target: memoryview, position: int) -> int:
    """Fills `target` with a file's bytes from `position` on; fewer where the file ends. Returns how
    many. Raises OSError.
    """
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], position + done)
        if not count:
            break
        done += count
    return done


def write_at(fd: int, data: bytes | memoryview, position: int) -> None:
    """Writes all of `data` to a file from `position` on. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], position + done)


def mark_used(path: Path) -> None:
    """Notes the use for `release`."""
    with suppress(OSError):
        os.utime(path)


@dataclass(frozen=True, slots=True)
class Hold:
    """Keeps what it holds from removal: while it is open, `release` of no process removes that."""

    fd: int

    def close(self) -> None:
        os.close(self.fd)


def hold(path: Path) -> Hold:
    """Holds a file or folder once begun removals are over, or its replacement. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return Hold(fd)
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def remove_held(held: Hold, path: Path) -> None:
    """Removes `path` once nobody else holds it; a replacement stays. Raises OSError."""
    # Gives the shared lock up first, so that two who hold it do not wait for each other.
    fcntl.flock(held.fd, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(held.fd), path.stat()):
            shutil.rmtree(path)


def entry_bytes(entry: os.DirEntry[str]) -> int:
    """Adds up the bytes of a file, or of all files in a folder. Raises OSError."""
    if entry.is_dir():
        return sum(map(entry_bytes, entries_of(Path(entry.path))))
    return entry.stat().st_size


Size = Callable[[os.DirEntry[str]], int]


def stored_bytes(folders: Iterable[Path], size: Size = entry_bytes) -> int:
    """Adds up the bytes of all entries in these folders."""
    total = 0
    for folder in folders:
        for entry in entries_of(folder):
            with suppress(OSError):
                total += size(entry)
    return total


def release(
    nbytes: int, folders: Iterable[Path], size: Size = entry_bytes, stay: Collection[str] = ()
) -> int:
    """Removes entries of `folders`, least recently used first, until `nbytes` are gone. Returns how
    many bytes there are still to go.

    Never what a `Hold` holds. stay: names of further entries that must stay.
    """
    if nbytes <= 0:
        return 0
    found: list[tuple[float, int, str]] = []
    for folder in folders:
        for entry in entries_of(folder):
            with suppress(OSError):
                if entry.name not in stay:
                    found.append((entry.stat().st_mtime, size(entry), entry.path))
    for _, freed, path in sorted(found):
        if remove_unused(Path(path)):
            nbytes -= freed
            if nbytes <= 0:
                break
    return max(0, nbytes)


def remove_unused(path: Path) -> bool:
    """Removes what nobody has locked. Returns whether it is gone. Raises OSError."""
    with suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not _lock(lock):
                return False
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(True)
        finally:
            os.close(lock)
    return True


def lock_file(path: Path) -> int | None:
    """Locks a file, made if need be, until closed; None = held elsewhere. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def boot_id() -> str:
    """The id of the machine's current boot, or "" where the system does not say. Data written in an
    earlier boot may never have reached the disk."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
