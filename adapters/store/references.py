"""Remembers on disk which digest each pinned reference has."""

import hashlib
import itertools
from contextlib import suppress
from pathlib import Path

import msgspec

from loraplex.adapters.common.disk import entries_of
from loraplex.adapters.ref import AdapterRef, format_ref

MAX_REFERENCES = 65_536
_TRIM_EVERY = 1024


class Known(msgspec.Struct, frozen=True):
    """nbytes: of all files that were published with this content; other places of the same content
    may have others beside it. 0 = remembered before that was kept."""

    ref: AdapterRef
    digest: str
    nbytes: int = 0


class References:
    """A file each in `folder`, some 65,536 at most; those that were put in first go. Thread-safe.

    Nothing waits for the disk: what a crash takes away is looked up again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._added = itertools.count()

    def find(self, ref: AdapterRef) -> Known | None:
        """Raises OSError."""
        try:
            known = msgspec.json.decode(self._file(ref).read_bytes(), type=Known)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return known if known.ref == ref else None

    def remember(self, known: Known, folder: Path) -> None:
        """folder: a folder of the caller's own beside this one. Raises OSError."""
        ref, written = known.ref, folder / "ref.json"
        written.write_bytes(msgspec.json.encode(known))
        written.chmod(0o444)
        written.rename(self._file(ref))
        if next(self._added) % _TRIM_EVERY == 0:
            self._trim()

    def _trim(self) -> None:
        entries = entries_of(self._folder)
        if len(entries) <= MAX_REFERENCES:
            return
        with suppress(FileNotFoundError):  # another process does the same
            entries.sort(key=lambda entry: entry.stat().st_mtime)
            for old in entries[: len(entries) - MAX_REFERENCES]:
                Path(old.path).unlink(missing_ok=True)

    def _file(self, ref: AdapterRef) -> Path:
        name = hashlib.sha256(format_ref(ref).encode()).hexdigest()
        return self._folder / f"{name}.json"
