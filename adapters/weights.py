"""A safetensors file on disk: its header, and its bytes in pieces."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from adapters.floats import Raw
from adapters.header import PREFIX_BYTES, TensorInfo, header_size, parse_header
from adapters.violations import invalid

# A core's own cache holds it, so that whatever is done with a piece reads no memory again; and
# enough that Python's part in it does not count. Whole numbers of any dtype.
PIECE_BYTES = 256 << 10


class WeightsFile:
    """Reads by position, so that a file which shrinks meanwhile is an error and not a signal."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self.nbytes = os.fstat(fd).st_size

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Raises AdapterError `invalid` with every violation of the format."""
        size = header_size(self._bytes(0, min(PREFIX_BYTES, self.nbytes)), self.nbytes)
        return parse_header(self._bytes(PREFIX_BYTES, PREFIX_BYTES + size), self.nbytes)

    def read(self, tensor: TensorInfo) -> Raw:
        """The tensor's bytes."""
        raw: Raw = np.empty(tensor.nbytes, np.uint8)
        self.read_into(tensor.start, raw)
        return raw

    def read_into(self, start: int, target: Raw) -> None:
        """Fills `target` with the bytes from `start` on."""
        view = target.data
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], start + done)
            if not count:
                message = f"{self._name} ends after {start + done} bytes"
                raise invalid("truncated", self._name, message)
            done += count

    def pieces(self, start: int, end: int) -> Iterator[Raw]:
        """The bytes in order. Each piece is overwritten by the next."""
        buffer: Raw = np.empty(min(PIECE_BYTES, end - start), np.uint8)
        for position in range(start, end, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, end - position)]
            self.read_into(position, piece)
            yield piece

    def identity(self) -> tuple[int, ...]:
        """Of the file as it is now; not of its name."""
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _bytes(self, start: int, end: int) -> bytes:
        raw: Raw = np.empty(end - start, np.uint8)
        self.read_into(start, raw)
        return raw.tobytes()


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    with path.open("rb", buffering=0) as file:
        yield WeightsFile(file.fileno(), path.name)
