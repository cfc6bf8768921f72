"""A safetensors file on disk: its header, and one tensor's bytes at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adapters.floats import Raw
from adapters.header import PREFIX_BYTES, TensorInfo, header_size, parse_header
from adapters.violations import invalid

_CHUNK_BYTES = 8 << 20


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
        raw: npt.NDArray[np.uint8] = np.frombuffer(
            self._bytes(tensor.start, tensor.end), dtype=np.uint8
        )
        return raw

    def pieces(self, tensor: TensorInfo) -> Iterator[tuple[Raw, str]]:
        """The tensor's bytes in bounded pieces, each with its dtype."""
        for chunk in self.chunks(tensor.start, tensor.end):
            yield np.frombuffer(chunk, dtype=np.uint8), tensor.dtype

    def chunks(self, start: int, end: int) -> Iterator[bytes]:
        for position in range(start, end, _CHUNK_BYTES):
            yield self._bytes(position, min(position + _CHUNK_BYTES, end))

    def _bytes(self, start: int, end: int) -> bytes:
        parts: list[bytes] = []
        while start < end:
            part = os.pread(self._fd, min(end - start, 1 << 30), start)
            if not part:
                raise invalid("truncated", self._name, f"{self._name} ends after {start} bytes")
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    with path.open("rb", buffering=0) as file:
        yield WeightsFile(file.fileno(), path.name)
