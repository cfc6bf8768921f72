"""Uploaded adapters on disk, by the digest of their files.

ROOT/DIGEST/          the files of an upload, as they came
    /staging/         uploads on their way; a locked folder each
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.adapters.common.disk import (
    entries_of,
    entry_bytes,
    free_bytes,
    mark_used,
    publish_folder,
    release,
    sync_files,
    sync_path,
)
from loraplex.adapters.common.unfinished import remove_stale, unfinished_folder
from loraplex.adapters.errors import AdapterError

_STAGING = "staging"
# Left to others of the disk's users.
_SPARE_BYTES = 64 << 20
# So long a request may still run that began with a version which is no longer kept.
_UNUSED_S = 900.0


def upload_folder(store: Path | None, cache_dir: Path) -> Path:
    """The folder of uploads that routers share, and workers that see it. store: the option."""
    return store or cache_dir / "uploads"


class UploadShelf:
    """Keeps uploads below `root`, up to `max_bytes`; those that were used least recently go first.

    Several processes may share a root. Methods may wait for the disk; they raise OSError.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root.expanduser()
        self.staging_root = self.root / _STAGING
        self._max_bytes = max_bytes

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A private folder for an upload, removed at the end."""
        self.staging_root.mkdir(parents=True, exist_ok=True)
        remove_stale(self.staging_root)
        with unfinished_folder(self.staging_root) as folder:
            yield folder

    def find(self, digest: str) -> Path | None:
        """The folder of an upload; None where it is not here."""
        folder = self.root / digest
        if not folder.is_dir():
            return None
        mark_used(folder)
        return folder

    def keep(self, staged: Path, digest: str, stay: Collection[str] = ()) -> None:
        """Moves the files of a staged upload to where they are found. stay: digests that must stay.

        What nobody needs and nobody has used for a while goes. Raises AdapterError where there is
        no room then.
        """
        if self.find(digest) is not None:
            return
        target = self.root / digest
        files = [path for path in staged.iterdir() if path.is_file()]
        self._make_room(sum(path.stat().st_size for path in files), stay)
        written = staged / digest
        written.mkdir()
        for path in files:
            path.rename(written / path.name)
        publish_folder(written, target, durable=False)

    def sync(self, digest: str) -> None:
        """Waits until an upload is safe on the disk."""
        sync_files(self.root / digest)
        sync_path(self.root)

    def _make_room(self, nbytes: int, stay: Collection[str]) -> None:
        entries = [entry for entry in entries_of(self.root) if entry.name != _STAGING]
        old = time.time() - _UNUSED_S
        unused = [e for e in entries if e.name not in stay and e.stat().st_mtime < old]
        excess = sum(map(entry_bytes, entries)) + nbytes - self._max_bytes
        excess = max(excess, _SPARE_BYTES - free_bytes(self.root))
        wanted = max(excess, sum(map(entry_bytes, unused)))
        left = release(wanted, (self.root,), stay=(*stay, _STAGING))
        if wanted - left < excess:
            message = "the folder of uploads is full of versions that are kept"
            raise AdapterError("unavailable", message, (), 30.0)
