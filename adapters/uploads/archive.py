"""Tar archives of adapters, read and written as streams. Links, devices and other folders' files
are refused; nothing is held in memory but one piece.
"""

import asyncio
import tarfile
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from loraplex.adapters.errors import AdapterError, invalid, shown
from loraplex.adapters.peft.files import is_relevant, is_unsafe
from loraplex.adapters.uploads.sink import FileSink

PIECE_BYTES = 1 << 20
_MAX_NOTE_BYTES = 64 << 10
# Notes about the next entry (POSIX.1-2001 pax, GNU), whose own name may be in them.
_NOTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_GNU_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class ByteStream(Protocol):
    """Bytes that come in order."""

    def read(self, count: int) -> bytes:
        """The next bytes: `count` of them, or fewer at the end."""
        ...


def unpack_archive(stream: ByteStream, sink: FileSink) -> None:
    """Gives the files of a tar to `sink`. All lie at the top, or in one folder. Raises
    AdapterError, and what the stream and the sink raise."""
    folders: set[str] = set()
    while (entry := _next_entry(stream)) is not None:
        if entry.type == tarfile.DIRTYPE:
            continue
        if entry.type in _NOTES + _GNU_NAMES:
            _check_note(entry, _exactly(stream, _padded(entry.size))[: entry.size])
            continue
        name = _file_name(entry, folders)
        sink.begin(name, entry.size)
        _pass_on(stream, entry.size, sink)
        sink.end()
        _exactly(stream, _padded(entry.size) - entry.size)


def adapter_files(folder: Path) -> list[Path]:
    """The files of a folder that say something of an adapter, without pickles. Raises OSError."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [folder / name for name in names if is_relevant(name) and not is_unsafe(name)]


def archive_pieces(paths: Iterable[Path]) -> Iterator[bytes]:
    """A tar of files, in pieces of at most `PIECE_BYTES`. Raises OSError."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            entry = tarfile.TarInfo(path.name)
            entry.size = size
            yield entry.tobuf(tarfile.USTAR_FORMAT if size < 8 << 30 else tarfile.GNU_FORMAT)
            left = size
            while left and (piece := file.read(min(PIECE_BYTES, left))):
                left -= len(piece)
                yield piece
            yield bytes(left + _padded(size) - size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def archive_bytes(paths: Iterable[Path]) -> int:
    """The length of the tar of these files. Raises OSError."""
    sizes = [path.stat().st_size for path in paths]
    return sum(tarfile.BLOCKSIZE + _padded(size) for size in sizes) + 2 * tarfile.BLOCKSIZE


async def archive_stream(paths: Iterable[Path]) -> AsyncIterator[bytes]:
    """The same pieces for an event loop: threads read the disk."""
    pieces = archive_pieces(paths)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _next_entry(stream: ByteStream) -> tarfile.TarInfo | None:
    """The next header; None at the end. What follows the end is read and dropped."""
    block = stream.read(tarfile.BLOCKSIZE)
    if block == bytes(tarfile.BLOCKSIZE):
        while stream.read(PIECE_BYTES):
            pass
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        raise _bad("is cut off, or is no uncompressed tar") from None


def _check_note(entry: tarfile.TarInfo, note: bytes) -> None:
    """Checks that a note changes nothing that is read here: times and owners are not."""
    changes = entry.type in _GNU_NAMES or any(
        record in note for record in (b" path=", b" size=", b" GNU.sparse")
    )
    if changes:
        raise _bad("has an entry whose name or size is longer than a plain header holds")


def _file_name(entry: tarfile.TarInfo, folders: set[str]) -> str:
    folder, _, name = entry.name.removeprefix("./").rpartition("/")
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise invalid("not_a_file", entry.name, f"{shown(entry.name)} is not a regular file")
    folders.add(folder)
    if entry.name.startswith("/") or ".." in entry.name.split("/") or "/" in folder:
        message = f"{shown(entry.name)} does not lie at the top of the archive, or in one folder"
        raise invalid("escaping_path", entry.name, message)
    if len(folders) > 1:
        raise invalid("several_folders", entry.name, "the archive has files of several folders")
    return name


def _pass_on(stream: ByteStream, count: int, sink: FileSink) -> None:
    while count:
        piece = stream.read(min(count, PIECE_BYTES))
        if not piece:
            raise _bad("is cut off")
        sink.write(piece)
        count -= len(piece)


def _exactly(stream: ByteStream, count: int) -> bytes:
    if count > _MAX_NOTE_BYTES:
        raise _bad(f"has a note of more than {_MAX_NOTE_BYTES} bytes")
    read = stream.read(count)
    if len(read) < count:
        raise _bad("is cut off")
    return read


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _bad(what: str) -> AdapterError:
    return invalid("bad_archive", "", f"the archive {what}")
