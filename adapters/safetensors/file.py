"""Safetensors files on disk: their header, and their bytes in pieces."""

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from loraplex.adapters.common.disk import read_at
from loraplex.adapters.errors import Findings, invalid
from loraplex.adapters.safetensors.floats import Raw
from loraplex.adapters.safetensors.header import (
    MAX_TENSORS,
    PREFIX_BYTES,
    FileSpan,
    TensorInfo,
    header_size,
    join_shards,
    parse_header,
)

# A piece fits into a core's own cache, so its later uses read no memory again. It is large enough
# that Python's overhead does not count. Whole numbers of any dtype.
PIECE_BYTES = 256 << 10
MOST_TARGETS = 1024  # of one call, as Linux has it


class Weights(ABC):
    """The bytes of one safetensors file, wherever they lie. name: in what is said of it."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes

    @abstractmethod
    def read_into(self, start: int, target: Raw) -> None:
        """Fills `target` with the bytes from `start` on."""

    @abstractmethod
    def identity(self) -> tuple[int, ...]:
        """Identifies the files as they are now, whatever their names."""

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Reads the header. Raises AdapterError `invalid` with every violation of the format."""
        return parse_header(self.header(), self.nbytes, self.name)

    def header(self) -> bytes:
        """The JSON of the file's header. Raises AdapterError `invalid`."""
        size = header_size(self._bytes(0, min(PREFIX_BYTES, self.nbytes)), self.nbytes, self.name)
        return self._bytes(PREFIX_BYTES, PREFIX_BYTES + size)

    def read(self, tensor: TensorInfo) -> Raw:
        """The tensor's bytes."""
        raw: Raw = np.empty(tensor.nbytes, np.uint8)
        self.read_into(tensor.start, raw)
        return raw

    def pieces(self, start: int, end: int) -> Iterator[Raw]:
        """The bytes in order. Each piece is overwritten by the next."""
        buffer: Raw = np.empty(min(PIECE_BYTES, end - start), np.uint8)
        for position in range(start, end, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, end - position)]
            self.read_into(position, piece)
            yield piece

    def _bytes(self, start: int, end: int) -> bytes:
        raw: Raw = np.empty(end - start, np.uint8)
        self.read_into(start, raw)
        return raw.tobytes()


class WeightsFile(Weights):
    """Reads by position, so that a file which shrinks meanwhile is an error and not a signal."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(name, os.fstat(fd).st_size)
        self._fd = fd

    def read_into(self, start: int, target: Raw) -> None:
        done = read_at(self._fd, target.data, start)
        if done < len(target):
            message = f"{self.name} ends after {start + done} bytes"
            raise invalid("truncated", self.name, message)

    def read_apart(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fills each of `targets`, at most `MOST_TARGETS`, with the bytes that follow."""
        done = os.preadv(self._fd, targets, start)
        for target in targets:
            if done < len(target):
                self.read_into(start, np.frombuffer(target, np.uint8))
            start, done = start + len(target), max(0, done - len(target))

    def identity(self) -> tuple[int, ...]:
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class JoinedWeights(Weights):
    """Several files, read as the one that they stand for (`weights_index.join_shards`)."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, WeightsFile],
        beginning: bytes,
        segments: Sequence[FileSpan],
    ) -> None:
        self._files = files
        self._beginning: Raw = np.frombuffer(beginning, np.uint8)
        self._segments = [segment for segment in segments if segment.start < segment.end]
        self._starts = [segment.start for segment in self._segments]
        super().__init__(name, self._segments[-1].end if self._segments else len(beginning))

    def read_into(self, start: int, target: Raw) -> None:
        done = min(max(len(self._beginning) - start, 0), len(target))
        target[:done] = self._beginning[start : start + done]
        while done < len(target):
            position = start + done
            segment = self._segments[bisect_right(self._starts, position) - 1]
            part = target[done : done + segment.end - position]
            source = segment.source + position - segment.start
            self._files[segment.file].read_into(source, part)
            done += len(part)

    def identity(self) -> tuple[int, ...]:
        return tuple(number for file in self._files.values() for number in file.identity())


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    with path.open("rb", buffering=0) as file:
        yield WeightsFile(file.fileno(), path.name)


def join_files(folder: Path, index: Mapping[str, str], name: str) -> None:
    """Makes the one file `name` of the files that the index names, and removes those. Raises as
    `open_shards`, and OSError."""
    with open_shards(folder, index, name) as joined, (folder / name).open("wb") as target:
        for piece in joined.pieces(0, joined.nbytes):
            target.write(piece.data)
    for file in set(index.values()):
        (folder / file).unlink()


@contextmanager
def open_shards(folder: Path, index: Mapping[str, str], name: str) -> Iterator[JoinedWeights]:
    """The files that the index names, as the one file `name`. Raises AdapterError `invalid` with
    every violation of a file's format and of the index."""
    findings = Findings()
    with ExitStack() as opened:
        files = {
            file: opened.enter_context(open_weights(folder / file))
            for file in sorted(set(index.values()))
        }
        shards: dict[str, tuple[TensorInfo, ...]] = {}
        for file, weights in files.items():
            with findings.gathered():
                shards[file] = weights.tensors()
            if sum(map(len, shards.values())) > MAX_TENSORS:
                break
        findings.raise_if_any()
        beginning, segments = join_shards(index, shards, findings)
        findings.raise_if_any()
        yield JoinedWeights(name, files, beginning, segments)
