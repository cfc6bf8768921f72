"""Keeps stored content within its disk quota: the least recently used is removed."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loraplex.adapters.common.disk import (
    entry_bytes,
    free_bytes,
    release,
    stored_bytes,
    tell_of_disk,
)
from loraplex.adapters.errors import AdapterError

# Of the disk, that content leaves to others.
HEADROOM_BYTES = 64 << 20
MAX_SIZES = 1 << 17
_RETRY_S = 30.0


class Quota:
    """`max_bytes` for what lies in `folders`, and never more than the disk has. Thread-safe.

    What another holds (`loraplex.adapters.common.disk.hold`) stays, even if the quota is exceeded
    for a while.
    spare: what lies there is not counted, and goes first when the disk has no room.
    """

    def __init__(self, max_bytes: int, folders: Sequence[Path], spare: Path) -> None:
        self.max_bytes = max_bytes
        self._folders = tuple(folders)
        self._spare = (spare,)
        self._lock = threading.Lock()
        self._expected = 0
        self._sizes: dict[tuple[str, int], int] = {}

    def check(self, nbytes: int) -> None:
        """Raises AdapterError when the disk has no room for `nbytes`, whatever were removed."""
        shortage = self._shortage(nbytes)
        if shortage > 0 and shortage > stored_bytes(self._folders + self._spare):
            tell_of_disk(self._folders[0], f"{shortage} bytes more would have to be free", "full")
            message = "the disk of the adapter store has no room for this adapter"
            raise AdapterError("unavailable", message, (), _RETRY_S)

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Made for what is written while inside; several who write count together."""
        # One at a time: two who saw the same content would both remove what one of them needs.
        with self._lock:
            release(self._shortage(nbytes), self._spare)
            excess = (
                stored_bytes(self._folders, self._size) + self._expected + nbytes - self.max_bytes
            )
            release(max(excess, self._shortage(nbytes)), self._folders, self._size)
            self._expected += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._expected -= nbytes

    def _size(self, entry: os.DirEntry[str]) -> int:
        """What is stored never changes: it is measured once, as there may be thousands."""
        key = entry.path, entry.inode()
        size = self._sizes.get(key)
        if size is None:
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            size = self._sizes[key] = entry_bytes(entry)
        return size

    def _shortage(self, nbytes: int) -> int:
        return nbytes + HEADROOM_BYTES - free_bytes(self._folders[0])
