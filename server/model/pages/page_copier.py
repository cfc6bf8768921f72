"""Copies of whole pages between the device, host memory and the disk, beside the steps.

Host memory is page-major: a page's numbers of all layers lie together there, as they do on the
device. So a page is one copy, and neighbours are one copy together; the copy engines make them, and
no multiprocessor is taken from the steps.

On the disk a page is a file. Its name is a hash of tokens, which proves nothing about bytes. So a
file lies in a folder of all that its bytes depend on (`PageForm`), repeats that and the page's
name, and ends in a checksum.
"""

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from loraplex.adapters.common.disk import free_bytes, lock_file
from loraplex.server.engine.executor import PageCopies, PagesCopied, PageWay
from loraplex.server.model.pages.pinned import coalesce, pin, unpin

# Raised when pages of the same form hold something else than before.
_VERSION = 1
_SUFFIX, _UNFINISHED, _LOCK = ".page", ".part", "lock"
# Left free on the disk.
_HEADROOM_BYTES = 64 << 20
_SUM_BYTES = hashlib.sha256().digest_size

log = logging.getLogger(__name__)

_READERS = 4
_DONE: dict[PageWay, str] = {"write": "written to disk", "read": "read from disk"}


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


class _Moving(NamedTuple):
    """Copies under way. ended: recorded behind those of the device. faults: of each thread that
    copies pages of the disk, the reasons of those that failed, by place."""

    copies: PageCopies
    ended: torch.cuda.Event | None = None
    faults: Sequence[Future[dict[int, str]]] = ()

    @property
    def is_over(self) -> bool:
        if self.ended is not None:
            return bool(self.ended.query())
        return all(fault.done() for fault in self.faults)


class PageCopier:
    """Copies to the host and from there have a stream each. Nothing here waits for the device, nor
    for the disk, which threads read and write: pages are written, and dropped, in order.

    On the CPU `start` copies.
    """

    def __init__(
        self,
        pools: Sequence[torch.Tensor],
        memory: memoryview,
        slots: int,
        files: PageFiles | None,
        *,
        after_steps: bool,
    ) -> None:
        """Pin the memory. pools: `[pages, n]` each; a page is a row of each. memory: of so many
        slots of a page. after_steps: whether copies wait on the device for what was launched before
        them: other devices of a group may be done with a step while this one is not.

        Raises MemoryError where the memory cannot be pinned.
        """
        self._pools = [pool.view(torch.uint8) for pool in pools]
        host = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0)
        sizes = [slots * pool.shape[1] for pool in self._pools]
        parts = host[: sum(sizes)].split(sizes)
        self._slots = [part.view(slots, -1) for part in parts] if slots else []
        self._pinned = host if slots and pools[0].is_cuda else None
        if self._pinned is not None and not pin(self._pinned):
            raise MemoryError(f"{len(memory)} bytes of host memory cannot be pinned")
        on_gpu = self._pinned is not None
        self._out = torch.cuda.Stream() if on_gpu else None
        self._in = torch.cuda.Stream() if on_gpu else None
        self._after_steps = after_steps
        self._files = files
        self._writer = ThreadPoolExecutor(1, "page-writer")
        self._readers = ThreadPoolExecutor(_READERS, "page-reader")
        self._moving: list[_Moving] = []
        self._lost: Exception | None = None

    def start(self, copies: PageCopies) -> None:
        """Begin copies. Raises nothing: `poll` tells what went wrong."""
        try:
            with torch.inference_mode():
                self._moving.append(self._start(copies))
        except Exception as lost:  # CUDA's, of any type
            self._lost = lost

    def poll(self) -> list[PagesCopied]:
        """The copies that are over; never blocks. Raises what CUDA says when the device is lost."""
        if self._lost is not None:
            raise self._lost
        if not self._moving:
            return []
        ended, going = list[_Moving](), list[_Moving]()
        for moving in self._moving:
            (ended if moving.is_over else going).append(moving)
        self._moving = going
        return [_told(moving) for moving in ended]

    def stored(self, most: int) -> tuple[bytes, ...]:
        """Names of the pages on disk, as `PageFiles.stored` says."""
        return () if self._files is None else tuple(self._files.stored(most))

    def close(self) -> None:
        for threads in (self._writer, self._readers):
            threads.shutdown(cancel_futures=True)
        if self._files is not None:
            self._files.close()
        if self._pinned is not None:
            for stream in filter(None, (self._out, self._in)):
                with suppress(RuntimeError):  # the device may be lost
                    stream.synchronize()
            unpin(self._pinned)
        self._slots = []

    def _start(self, copies: PageCopies) -> _Moving:
        files = self._files
        if copies.way in ("out", "in"):
            return self._copy(copies)
        assert files is not None
        if copies.way == "read":
            places = range(len(copies.keys))
            parts = [places[first::_READERS] for first in range(_READERS)]
            act = partial(self._on_disk, files.read, copies)
            return _Moving(copies, faults=[self._readers.submit(act, part) for part in parts])
        act = partial(self._on_disk, files.write, copies)
        if copies.way == "drop":
            act = partial(_drop, files, copies)
        return _Moving(copies, faults=[self._writer.submit(act, range(len(copies.keys)))])

    def _copy(self, copies: PageCopies) -> _Moving:
        is_out = copies.way == "out"
        stream = self._out if is_out else self._in
        if stream is None:
            for target, source in self._rows(copies, is_out):
                target.copy_(source)
            return _Moving(copies)
        if self._after_steps:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in self._rows(copies, is_out):
                target.copy_(source, non_blocking=True)
        return _Moving(copies, stream.record_event())

    def _rows(
        self, copies: PageCopies, is_out: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where each run of pages goes, and where it is."""
        for count, slot, page in coalesce([1] * len(copies.pages), copies.slots, copies.pages):
            for pool, slots in zip(self._pools, self._slots, strict=True):
                device, host = pool[page : page + count], slots[slot : slot + count]
                yield (host, device) if is_out else (device, host)

    def _on_disk(
        self,
        act: Callable[[bytes, Sequence[memoryview]], None],
        copies: PageCopies,
        places: Iterable[int],
    ) -> dict[int, str]:
        """In a thread: write, or read, the pages at these places. Returns those that failed."""
        faults = {}
        for place in places:
            try:
                slot = copies.slots[place]
                act(copies.keys[place], [memoryview(of[slot].numpy()) for of in self._slots])
            except PageFault as fault:
                faults[place] = str(fault)
        return faults


def _drop(files: PageFiles, copies: PageCopies, places: Iterable[int]) -> dict[int, str]:
    for place in places:
        files.drop(copies.keys[place])
    return {}


def _told(moving: _Moving) -> PagesCopied:
    copies, faults = moving.copies, dict[int, str]()
    for of_thread in moving.faults:
        faults |= of_thread.result()
    if faults:
        what, why = _DONE[copies.way], next(iter(faults.values()))
        text = "%d of %d pages could not be %s: %s"
        log.warning(text, len(faults), len(copies.keys), what, why)
    return PagesCopied(copies.number, tuple(sorted(faults)))
