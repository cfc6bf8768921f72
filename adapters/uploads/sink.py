"""Files of an upload: checked as they come, written to a folder, named by what they hold."""

import hashlib
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from loraplex.adapters.errors import AdapterError, Findings, invalid, shown
from loraplex.adapters.peft.config import CONFIG_FILE, MAX_CONFIG_BYTES, parse_config
from loraplex.adapters.peft.files import SIDE_FILES, is_relevant, is_unsafe
from loraplex.adapters.safetensors.header import (
    PREFIX_BYTES,
    WEIGHTS_FILE,
    header_size,
    parse_header,
)

MAX_FILES = 64
_UNKNOWN_BYTES = 1 << 62
_HASHING = ThreadPoolExecutor(16, "upload-hash")


class FileSink:
    """Takes files one after another, each as `begin`, any number of `write`, `end`.

    max_bytes: of all files together. Files that say nothing of an adapter are dropped. Every method
    raises AdapterError for what cannot be part of an adapter, as soon as that is known, and OSError
    of the disk.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._files: dict[str, tuple[int, str]] = {}
        self._seen = 0
        self._pickles: list[str] = []
        self._file: _OpenFile | None = None
        self.nbytes = 0

    def begin(self, name: str, size: int | None = None) -> None:
        """Begins a file. name: without a folder. size: bytes, if they are known."""
        self._seen += 1
        if self._seen > MAX_FILES:
            raise invalid("too_many_files", "", f"the upload has more than {MAX_FILES} files")
        if name in self._files:
            raise invalid("duplicate_file", name, f"{shown(name)} comes twice")
        self._check_size(name, size or 0)
        self._file = None
        if is_unsafe(name):  # a trainer's own state, if there are weights beside it
            self._pickles.append(name)
        elif is_relevant(name):
            self._file = _OpenFile(self._folder / name, size)

    def write(self, piece: bytes | memoryview) -> None:
        """Takes the next bytes, which must not change afterwards."""
        self.nbytes += len(piece)
        if self.nbytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        if self._file is not None:
            self._check_size(self._file.path.name, self._file.nbytes + len(piece))
            self._file.write(piece)

    def end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._files[file.path.name] = file.close()

    def finish(self) -> str:
        """The digest of all files: sha256 hex over their names, sizes and own sha256. Raises
        AdapterError unless there are a config and weights."""
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if name not in self._files:
                if self._pickles and name == WEIGHTS_FILE:
                    message = f"{shown(self._pickles[0])} is a pickle, which is never opened"
                    raise invalid("unsafe_format", self._pickles[0], message)
                raise invalid("missing_file", name, f"the upload has no {name}")
        lines = (f"{name}\0{size}\0{sha}\n" for name, (size, sha) in sorted(self._files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def close(self) -> None:
        """Closes a file that was not ended."""
        if self._file is not None:
            self._file.abandon()

    def _check_size(self, name: str, size: int) -> None:
        if self.nbytes + size > self._max_bytes and name == WEIGHTS_FILE:
            raise _too_large(self._max_bytes)
        most = {CONFIG_FILE: MAX_CONFIG_BYTES, **SIDE_FILES}.get(name)
        if most is not None and size > most:
            message = f"{name} has more than {most} bytes, which are the most that are read"
            raise invalid("file_too_large", name, message)


class _OpenFile:
    """A file on its way to the disk. size: bytes that were announced, or None."""

    def __init__(self, path: Path, size: int | None) -> None:
        self.path = path
        self.nbytes = 0
        self._size = size
        self._sha256 = hashlib.sha256()
        self._hashing: Future[None] | None = None
        self._file: IO[bytes] = path.open("xb", buffering=0)
        # The start of weights whose header was not checked yet.
        self._start = bytearray() if path.name == WEIGHTS_FILE else None

    def write(self, piece: bytes | memoryview) -> None:
        self.nbytes += len(piece)
        self._wait_for_hash()
        self._hashing = _HASHING.submit(self._sha256.update, piece)
        if self._start is not None:
            self._start += piece
            self._check_header(self._size)
        view = memoryview(piece)
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> tuple[int, str]:
        """Bytes and sha256 hex of the whole file. Raises AdapterError for one that cannot be."""
        self.abandon()
        self.path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        if self._start is not None:
            self._check_header(self.nbytes)
        if self.path.name == CONFIG_FILE:
            findings = Findings()
            parse_config(self.path.read_bytes(), findings)
            findings.raise_if_any()
        self._wait_for_hash()
        return self.nbytes, self._sha256.hexdigest()

    def _wait_for_hash(self) -> None:
        """Pieces are hashed one after another, each while it is written and the next one comes."""
        if self._hashing is not None:
            self._hashing.result()

    def abandon(self) -> None:
        """Closes the file as it is."""
        self._file.close()

    def _check_header(self, size: int | None) -> None:
        """Checks the header of weights once it is there. size: bytes of the file, if known."""
        assert self._start is not None
        if size is None and len(self._start) < PREFIX_BYTES:
            return
        prefix = bytes(self._start[:PREFIX_BYTES])
        if len(prefix) < PREFIX_BYTES and self.nbytes < (size or 0):
            return
        end = PREFIX_BYTES + header_size(prefix, size if size is not None else _UNKNOWN_BYTES)
        del self._start[end:]
        if size is not None and len(self._start) == end:
            parse_header(bytes(self._start[PREFIX_BYTES:]), size)
            self._start = None


def _too_large(max_bytes: int) -> AdapterError:
    return AdapterError("too_large", f"an upload may have at most {max_bytes} bytes")
