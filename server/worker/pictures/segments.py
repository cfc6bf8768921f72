"""Files in shared memory that carry patches from the worker to the engine."""

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from loraplex.adapters.common.disk import remove_unused
from loraplex.server.engine.messages import SEGMENT_FOLDER

_PREFIX = "loraplex-picture-"


class PatchSegment:
    """A file of float32 `[rows, columns]`, until `remove`. It is locked as long as its maker lives.
    Raises OSError when there is no room."""

    def __init__(self, rows: int, columns: int) -> None:
        self.name = _PREFIX + secrets.token_hex(16)
        self.rows, self.columns = rows, columns
        # Under this name `remove_stale` of another worker does not find it before it is locked.
        unlocked = SEGMENT_FOLDER / f".{self.name}"
        self._fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            unlocked.rename(SEGMENT_FOLDER / self.name)
            os.posix_fallocate(self._fd, 0, 4 * rows * columns)
        except OSError:
            unlocked.unlink(missing_ok=True)
            self.remove()
            raise

    def fill(self, write: Callable[[npt.NDArray[np.float32]], None]) -> None:
        """Has `write` put the numbers into the file."""
        memory = mmap.mmap(self._fd, 4 * self.rows * self.columns)
        write(np.frombuffer(memory, np.float32).reshape(self.rows, self.columns))

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SEGMENT_FOLDER / self.name)
        os.close(self._fd)


def remove_stale() -> None:
    """Removes files whose makers were killed."""
    for path in SEGMENT_FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            remove_unused(path)
