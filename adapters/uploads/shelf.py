"""Uploaded adapters on disk, by the digest of their files.

ROOT/DIGEST/          the files of an upload, as they came
    /staging/         uploads on their way; a locked folder each
"""

import shutil
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
        sizes = {entry.name: entry_bytes(entry) for entry in entries}
        excess = sum(sizes.values()) + nbytes - self._max_bytes
        excess = max(excess, _SPARE_BYTES - free_bytes(self.root))
        old = time.time() - _UNUSED_S
        for used, digest in sorted((entry.stat().st_mtime, entry.name) for entry in entries):
            if digest not in stay and (excess > 0 or used < old):
                shutil.rmtree(self.root / digest, ignore_errors=True)
                excess -= sizes[digest]
        if excess > 0:
            message = "the folder of uploads is full of versions that are kept"
            raise AdapterError("unavailable", message, (), 30.0)
