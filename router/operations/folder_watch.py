"""Keeps registered adapters as the sub-folders of watched folders, while these come and go."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from loraplex.adapters.peft.files import is_relevant, is_unsafe
from loraplex.adapters.sources.local import MAX_ENTRIES, identity
from loraplex.router.names.served import OwnedName
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.operations.declarations import POLL_S, DeclarationWatch
from loraplex.router.operations.watched_folders import (
    Look,
    Stamp,
    is_whole,
    name_folders,
    plan,
    settle,
)

# The share of the time that looks may take: the more sub-folders, the fewer looks.
_LOOK_SHARE = 0.02


class WatchedFolders(DeclarationWatch):
    """Watches folders and registers their sub-folders. errors: by name; of a sub-folder without a
    name, or a whole folder, by path.
    """

    origin = "folder"
    option = "--watch-folder"

    def __init__(
        self, folders: Sequence[Path], admin: AdapterAdmin, clock: Callable[[], float]
    ) -> None:
        super().__init__("watched folders", admin, clock)
        paths = [os.path.abspath(folder.expanduser()) for folder in folders]
        self._looks: dict[str, Look | None] = dict.fromkeys(paths)
        self._settled: dict[str, Mapping[str, Stamp]] = {path: {} for path in paths}
        self._unreadable: dict[OwnedName, str] = {}
        # What the last changes were made of, and what was tried under each name.
        self._applied: tuple[object, ...] = ()
        self._changes = -1
        self._stamps: dict[OwnedName, Stamp] = {}

    async def poll(self) -> None:
        """Looks, and acts if sub-folders or names have changed, or something failed before."""
        began = self._clock()
        is_certain = await asyncio.to_thread(self._look)
        self.pause_s = max(POLL_S, (self._clock() - began) / _LOOK_SHARE)
        if not is_certain or not self._admin.workers.ready:
            return
        seen, changes = (dict(self._settled), self._unreadable), self._admin.aliases.changes
        if seen != self._applied or changes != self._changes or self._is_due:
            self._applied, self._changes = seen, changes
            self._report(await self._reconcile() | self._unreadable)

    async def _reconcile(self) -> dict[OwnedName, str]:
        """Bring names in line with the sub-folders. Returns problems by name."""
        admin, is_due = self._admin, self._is_due
        wanted, unnamed = name_folders(self._settled.values())
        table = admin.concerning("folder", wanted)
        todo = plan(wanted, table, self._stamps, self.errors, is_due)
        if is_due or not self.errors:
            self._tried_at = self._clock()
        self._stamps = todo.stamps
        failed = await self._change(
            todo.register, *((name, admin.delete(name)) for name in todo.delete)
        )
        return unnamed | todo.errors | failed

    def _look(self) -> bool:
        """Looks into all folders. Returns False where one was seen for the first time: nothing can
        be said of it yet. A folder that cannot be read stays as it was.
        """
        unreadable: dict[OwnedName, str] = {}
        is_certain = True
        for folder, before in self._looks.items():
            try:
                now = look_into(folder)
            except OSError as error:
                unreadable[OwnedName(folder)] = f"it cannot be read: {error.strerror}"
                continue
            is_certain &= before is not None
            self._settled[folder] = settle(self._settled[folder], before or {}, now)
            self._looks[folder] = now
        self._unreadable = unreadable
        return is_certain


def look_into(folder: str) -> Look:
    """Looks at all sub-folders of a folder, links to folders among them. Raises OSError."""
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if os.path.isdir(entry.path)]
    return {path: stamp_of_files(path) for path in paths}


def stamp_of_files(folder: str) -> Stamp | None:
    """A stamp of the files of a sub-folder that count; None if they are no whole adapter.

    What cannot be looked at has a stamp, too: the worker says what is wrong with it.
    """
    try:
        with os.scandir(folder) as entries:
            files = {
                entry.name: identity(entry.stat(follow_symlinks=not is_unsafe(entry.name)))
                for entry in islice(entries, MAX_ENTRIES)
                if is_relevant(entry.name)
            }
    except OSError as error:
        return ((error.errno,),)
    return tuple(sorted(files.items())) if is_whole(files) else None
