"""Adapters that were uploaded: their files lie in folders of this machine, by digest."""

import os
from collections.abc import Sequence
from pathlib import Path

from loraplex.adapters.content_check import copy_leaves
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.uploads.shelf import UploadShelf


class UploadSource:
    """Finds uploads on shelves: a worker's own, and one that it shares with routers."""

    def __init__(self, shelves: Sequence[UploadShelf]) -> None:
        self._shelves = tuple(shelves)

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        return ref

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._folder(ref).iterdir()}

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        return ()

    def fetch_file(self, ref: AdapterRef, token: str | None, name: str, folder: Path) -> None:
        """Puts a file into `folder`: by a link if one disk has both, as uploads do not change."""
        source, target = self._folder(ref) / name, folder / name
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise _missing() from None
        except OSError:
            with source.open("rb") as read, target.open("xb", buffering=0) as written:
                copy_leaves(read.fileno(), written.fileno(), source.stat().st_size)

    def _folder(self, ref: AdapterRef) -> Path:
        for shelf in self._shelves:
            folder = shelf.find(ref.name)
            if folder is not None:
                return folder
        raise _missing()


def _missing() -> AdapterError:
    return AdapterError("missing", "the worker does not have the files of this upload")
