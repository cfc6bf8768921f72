"""Resumes downloads. Received bytes lie in a `.partial` file until all have come."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple

from loraplex.adapters.errors import AdapterError

# A slower server than this holds a thread for nothing.
MIN_BYTES_PER_S = 256 << 10
GRACE_S = 60.0
_BROKEN_RETRY_S = 0.5


class RemoteBytes(NamedTuple):
    """A file's bytes from an offset on. start: that offset, of the first chunk."""

    start: int
    chunks: Iterable[bytes]


_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]+/[0-9]+")
Open = Callable[[int], AbstractContextManager[RemoteBytes]]


def range_start(status: int, content_range: str | None) -> int:
    """Reads the place in the file where the body of an HTTP answer begins."""
    match = _RANGE.fullmatch(content_range or "")
    return int(match[1]) if match and status == 206 else 0


def partial_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def partial_bytes(target: Path) -> int:
    """Counts the bytes of a file that have come: a measure of progress."""
    for path in (target, partial_path(target)):
        if path.exists():
            return path.stat().st_size
    return 0


def fetch_resumable(target: Path, size: int, open_at: Open, clock: Callable[[], float]) -> None:
    """Makes `target` appear with exactly `size` bytes.

    open_at: the stream from an offset; a server may begin earlier. clock: seconds, monotonic.
    Raises AdapterError; the next call then asks for what is missing only.
    """
    partial = partial_path(target)
    with partial.open("ab") as file:
        offset = file.tell()
        if offset < size:
            with open_at(offset) as stream:
                if stream.start > offset:
                    raise _broken(target, "the server skipped a part")
                file.truncate(stream.start)
                _append(file, stream, size, clock)
    partial.rename(target)


def _append(file: IO[bytes], stream: RemoteBytes, size: int, clock: Callable[[], float]) -> None:
    deadline = clock() + GRACE_S + (size - stream.start) / MIN_BYTES_PER_S
    written = stream.start
    for chunk in stream.chunks:
        written += len(chunk)
        if written > size:
            file.truncate(0)
            raise _broken(Path(file.name), f"more than {size} bytes came")
        file.write(chunk)
        if clock() > deadline:
            message = f"the server sends less than {MIN_BYTES_PER_S >> 10} KiB a second"
            raise AdapterError("unavailable", message, (), GRACE_S)
    if written < size:
        raise _broken(Path(file.name), f"{written} bytes of {size} came")


def _broken(path: Path, reason: str) -> AdapterError:
    name = path.name.removesuffix(".partial")
    return AdapterError("unavailable", f"{name} did not come whole: {reason}", (), _BROKEN_RETRY_S)
