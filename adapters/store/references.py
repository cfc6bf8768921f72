"""References on disk: which content each of them meant."""

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
    """A pinned reference's digest.

    nbytes: of all files at this place; the same content may have other files elsewhere. 0 = the
    entry is older than this number.
    """

    ref: AdapterRef
    digest: str
    nbytes: int = 0


class References:
    """Remembers the digests of pinned references. A file each in `folder`, some 65,536 at most;
    those that were put in first go. Thread-safe.

    Nothing waits for the disk: what a crash takes away is looked up again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._added = itertools.count()

    def find(self, ref: AdapterRef) -> Known | None:
        """Looks up the digest of a pinned reference. Raises OSError."""
        try:
            known = msgspec.json.decode(self._file(ref).read_bytes(), type=Known)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return known if known.ref == ref else None

    def remember(self, known: Known, folder: Path) -> None:
        """Writes an entry. folder: the caller's own, on the same disk. Raises OSError."""
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
