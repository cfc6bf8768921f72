"""Pages of keys and values as files, one a page, that outlive the process. No torch.

A page's name is a hash of tokens, which proves nothing about bytes. So a file lies in a folder of
all that its bytes depend on (`PageForm`), repeats that and the page's name, and ends in a checksum.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from loraplex.adapters.common.disk import free_bytes, lock_file

# Raised when pages of the same form hold something else than before.
_VERSION = 1
_SUFFIX, _UNFINISHED, _LOCK = ".page", ".part", "lock"
# Left free on the disk.
_HEADROOM_BYTES = 64 << 20
_SUM_BYTES = hashlib.sha256().digest_size


class PageForm(msgspec.Struct, frozen=True):
    """All that the bytes of a page depend on beside its tokens, salt and adapter.

    base_digest: of the model as it is served. dtype: of what is computed; kv_dtype: of what is
    kept. layers: the group of each layer and its place in the group's pages. shard: of so many
    `shards`, which device's part. nbytes: of a page.
    """

    base_digest: str
    dtype: str
    kv_dtype: str
    page_size: int
    layers: tuple[tuple[int, int], ...]
    width: int
    shard: int
    shards: int
    nbytes: int
    version: int = _VERSION

    @property
    def digest(self) -> bytes:
        """The identity of the form: 32 bytes."""
        return hashlib.sha256(msgspec.json.encode(self)).digest()

    @property
    def folder(self) -> str:
        """The name of the folder that all shards have in common."""
        return msgspec.structs.replace(self, shard=0).digest.hex()


class PageFault(Exception):
    """A page that cannot be read as it was written, or not be written; str() says why."""


class PageFiles:
    """Pages of one form in a folder that no other process uses while this one lives.

    `write`, `read` and `drop` may run in several threads, of different pages.
    """

    def __init__(self, root: Path, form: PageForm) -> None:
        """Take a folder below `root`, and remove what processes that are gone have left of other
        forms. Raises OSError."""
        self._form = form.digest
        self.nbytes = form.nbytes
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (root / _LOCK).open("a") as choosing:
            fcntl.flock(choosing, fcntl.LOCK_EX)
            self._folder, self._lock = _own_folder(root, form)
            _remove_unused(root, form.folder)

    def stored(self, most: int) -> list[bytes]:
        """Names of the pages that are there, those longest written first. Unfinished files go, and
        the first of more than `most`."""
        found = list[tuple[int, bytes]]()
        for entry in os.scandir(self._folder):
            path = Path(entry.path)
            if path.suffix == _SUFFIX:
                with suppress(OSError, ValueError):
                    found.append((entry.stat().st_mtime_ns, bytes.fromhex(path.stem)))
            elif path.suffix == _UNFINISHED:
                self._remove(path)
        names = [name for _, name in sorted(found)]
        for name in names[: max(0, len(names) - most)]:
            self.drop(name)
        return names[max(0, len(names) - most) :]

    def write(self, name: bytes, pieces: Sequence[memoryview]) -> None:
        """Write a page; it appears whole or not at all. Raises PageFault."""
        path = self._path(name)
        unfinished = path.with_suffix(_UNFINISHED)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if free_bytes(self._folder) < self.nbytes + _HEADROOM_BYTES:
                raise PageFault("the disk is full")
            file = os.open(unfinished, flags, 0o600)
            try:
                parts: list[bytes | memoryview] = [
                    self._header(name),
                    *pieces,
                    self._sum(name, pieces),
                ]
                if os.writev(file, parts) != self._file_bytes(name):
                    raise PageFault("the disk took a part of it")
            finally:
                os.close(file)
            unfinished.rename(path)
        except OSError as error:
            raise PageFault(str(error)) from error
        finally:
            self._remove(unfinished)

    def read(self, name: bytes, pieces: Sequence[memoryview]) -> None:
        """Read a page. Raises PageFault; then the pieces hold anything."""
        header = self._header(name)
        found, checksum = bytearray(len(header)), bytearray(_SUM_BYTES)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(self._path(name), flags)
            try:
                parts: list[bytearray | memoryview] = [found, *pieces, checksum]
                count = os.preadv(file, parts, 0)
                size = os.fstat(file).st_size
            finally:
                os.close(file)
        except OSError as error:
            raise PageFault(str(error)) from error
        if not count == size == self._file_bytes(name):
            raise PageFault("the file has another size")
        if found != header or checksum != self._sum(name, pieces):
            raise PageFault("the file is not as it was written")

    def drop(self, name: bytes) -> None:
        self._remove(self._path(name))

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self._lock)

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{_SUFFIX}"

    def _file_bytes(self, name: bytes) -> int:
        return len(self._header(name)) + self.nbytes + _SUM_BYTES

    def _header(self, name: bytes) -> bytes:
        return self._form + len(name).to_bytes(1, "little") + name

    def _sum(self, name: bytes, pieces: Sequence[memoryview]) -> bytes:
        checksum = hashlib.sha256(self._header(name))
        for piece in pieces:
            checksum.update(piece)
        return checksum.digest()

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()


def _own_folder(root: Path, form: PageForm) -> tuple[Path, int]:
    """The first folder for this shard that no process has, and its lock. Several workers may serve
    one model from one disk."""
    number = 0
    while True:
        folder = root / form.folder / f"{number}-{form.shard}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_file(folder / _LOCK)
        if lock is not None:
            return folder, lock
        number += 1


def _remove_unused(root: Path, kept: str) -> None:
    """Remove folders that no process has, but those within `kept`: their room is wanted."""
    for folder in root.glob("*/*/"):
        if folder.parent.name == kept:
            continue
        lock = lock_file(folder / _LOCK)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            with suppress(OSError):
                folder.parent.rmdir()
