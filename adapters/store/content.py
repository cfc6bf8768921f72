"""Judged content on disk, a folder for each digest: its files and its manifest; and which content
each reference meant.

What is new can be used at once, and is safe from a crash a little later. Until it is, its manifest
has a name that only this boot of the machine knows. After a crash, files that may never have
reached the disk are not taken for content.
"""

import hashlib
import itertools
import logging
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec

from loraplex.adapters.common.disk import (
    boot_id,
    entries_of,
    hold,
    mark_used,
    publish_folder,
    remove_held,
    sync_files,
    sync_path,
)
from loraplex.adapters.errors import AdapterError, Violation
from loraplex.adapters.manifest import DIGEST_FORM, AdapterManifest
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.validate import WEIGHTS_FILE
from loraplex.adapters.ref import AdapterRef, format_ref

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MANIFEST_FILE = "manifest.json"

MAX_REFERENCES = 65_536
_TRIM_EVERY = 1024


class Contents:
    """Adapters' contents in a folder. Thread-safe, and so are several processes with one folder."""

    def __init__(self, folder: Path, syncing: Executor | None) -> None:
        """Keeps adapters' contents in a folder. syncing: threads that wait for the disk; None =
        callers wait themselves.
        """
        self._folder = folder
        boot = boot_id()
        self._syncing = syncing if boot else None
        self._fresh_manifest = f"manifest-{boot}.json"

    def path(self, digest: str) -> Path:
        return self._folder / digest

    def has(self, digest: str) -> bool:
        """Whether it is here. It does not count as a use."""
        return bool(_DIGEST.fullmatch(digest)) and any(
            (self._folder / digest / name).is_file() for name in self._manifest_files()
        )

    @contextmanager
    def held(self, digest: str) -> Iterator[AdapterManifest | None]:
        """Stored content, safe from eviction meanwhile. None: it is not here, or was damaged."""
        found = bool(_DIGEST.fullmatch(digest))
        with ExitStack() as held:
            if found:
                try:
                    held.enter_context(closing(hold(self._folder / digest)))
                except FileNotFoundError:
                    found = False
            yield self._manifest(digest) if found else None

    def keep(self, folder: Path, manifest: AdapterManifest) -> None:
        """Moves the files out of `folder`, which lies on the same disk, to where they are held.
        Where the same content is already, it stays. Raises OSError."""
        target = self._folder / manifest.digest
        written = folder / manifest.digest
        written.mkdir(exist_ok=True)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (folder / name).rename(written / name)
        later = self._syncing is not None
        name = self._fresh_manifest if later else _MANIFEST_FILE
        (written / name).write_bytes(msgspec.json.encode(manifest))
        # Only what was there when it was judged: another may publish the same content meanwhile.
        with suppress(FileNotFoundError), closing(hold(target)) as found:
            there = self._manifest(manifest.digest)
            if there is None or not there.knows_ends:
                remove_held(found, target)
        publish_folder(written, target, durable=not later)
        self._sync_later(manifest.digest)

    def give_up(self, digest: str) -> None:
        """Removes what is damaged. Raises OSError."""
        with suppress(FileNotFoundError):  # another does the same
            shutil.rmtree(self._folder / digest)

    def sync_all(self) -> None:
        """Syncs what an earlier process left unsynced. Raises OSError."""
        for entry in entries_of(self._folder):
            if (self._folder / entry.name / self._fresh_manifest).exists():
                self._sync_later(entry.name)

    def _manifest_files(self) -> tuple[str, str]:
        """Names the manifest before and after the content is synced."""
        return self._fresh_manifest, _MANIFEST_FILE

    def _manifest(self, digest: str) -> AdapterManifest | None:
        folder = self._folder / digest
        for name in self._manifest_files():
            try:
                manifest = msgspec.json.decode((folder / name).read_bytes(), type=AdapterManifest)
                weights = (folder / WEIGHTS_FILE).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # damaged
            if manifest.template is not None and manifest.special_tokens is None:
                continue  # written without them: to be judged again
            if manifest.form != DIGEST_FORM:
                continue  # known by a digest of another form: to be judged again
            if manifest.digest == digest and weights >= manifest.nbytes:
                mark_used(folder)
                return manifest
        return None

    def _sync_later(self, digest: str) -> None:
        if self._syncing is not None:
            self._syncing.submit(self._sync, digest)

    def _sync(self, digest: str) -> None:
        """Makes content safe on the disk, and then gives its manifest the final name."""
        folder = self._folder / digest
        try:
            with closing(hold(folder)):
                sync_files(folder)
                (folder / self._fresh_manifest).rename(folder / _MANIFEST_FILE)
                sync_path(folder)
                sync_path(self._folder)
        except FileNotFoundError:
            pass  # it was evicted, or another process did it
        except OSError as error:
            log.warning("adapter %.12s is not safe on the disk: %s", digest, error)


def present(manifest: AdapterManifest | None, digest: str) -> AdapterManifest:
    """Returns the manifest. Raises AdapterError `not_found` when it is None."""
    if manifest is None:
        raise AdapterError("not_found", f"adapter {digest[:12]} is not in the store")
    return manifest


def merged_member(manifest: AdapterManifest | None, digest: str) -> AdapterManifest:
    """Returns a member's manifest. Raises AdapterError `unavailable` when it is gone, since it can
    be fetched again, and `invalid` when it cannot be merged."""
    if manifest is None:
        message = f"adapter {digest[:12]} is not in the store any more; try again"
        raise AdapterError("unavailable", message, (), 1.0)
    if manifest.added_tokens:
        message = "a member adds tokens; such adapters cannot be merged or scaled"
        reason = Violation("unsupported_merge", digest, f"{digest} adds tokens to the base's")
        raise AdapterError("invalid", message, (reason,))
    return manifest


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
