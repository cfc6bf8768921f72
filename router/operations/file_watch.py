"""Keeps the registered adapters as the operator's file says, while the file changes."""

import asyncio
from collections.abc import Callable, Container
from pathlib import Path

from loraplex.router.file_stamp import Stamp, stamp_of
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.operations.adapters_file import (
    BY,
    MAX_FILE_BYTES,
    FileContents,
    plan,
    plan_rollouts,
    read,
    unreadable,
)
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.operations.declarations import DeclarationWatch
from loraplex.router.operations.rollouts import Rollouts


class AdaptersFile(DeclarationWatch):
    """Watches the adapters file and applies its changes. errors: by entry, or WHOLE.

    New versions of a name are not waited for: it means its `ref` until they are there.
    """

    origin = "file"
    option = "--adapters-file"

    def __init__(
        self,
        path: Path,
        admin: AdapterAdmin,
        rollouts: Rollouts,
        default_source: str,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(f"adapters file {path}", admin, clock)
        self._path = path
        self._rollouts = rollouts
        self._default_source = default_source
        self._stamp: Stamp | None = None

    async def poll(self) -> None:
        """Does what is to be done if the file has changed, or something failed a while ago."""
        if not self._admin.workers.ready:
            return
        stamp = await asyncio.to_thread(stamp_of, self._path)
        if stamp == self._stamp and not self._is_due:
            return
        self._stamp, self._tried_at = stamp, self._clock()
        contents = await asyncio.to_thread(read_file, self._path, self._default_source)
        self._report(await self._reconcile(contents))

    async def _reconcile(self, contents: FileContents) -> dict[OwnedName, str]:
        """Bring names in line with the file. Returns problems by entry."""
        admin = self._admin
        if contents.is_readable:
            admin.aliases.claimed = contents.names
        todo = plan(contents, admin.concerning("file", contents.wanted))
        for request, why in contents.not_understood.items():
            admin.declare_broken(request, why)
        failed = await self._change(
            todo.register,
            *((name, admin.pin(name)) for name in todo.pin),
            *((name, admin.unpin(name)) for name in todo.unpin),
            *((name, admin.delete(name)) for name in todo.delete),
        )
        errors = {**contents.errors, **todo.errors, **failed}
        return {**errors, **await self._reconcile_rollouts(contents, errors)}

    async def _reconcile_rollouts(
        self, contents: FileContents, failed: Container[OwnedName]
    ) -> dict[OwnedName, str]:
        """Bring rollouts in line with the file. Returns problems by entry. failed: names that are
        not as the file says."""
        concerned = self._admin.concerning("file", contents.wanted)
        there = [r for r in concerned if r.key not in failed]
        todo = plan_rollouts(contents, there)
        errors = await self._do(
            *(
                (name, self._rollouts.roll_out(name, request))
                for name, request in todo.roll_out.items()
            ),
            *((name, self._rollouts.end(name, BY, by_file=True)) for name in todo.end),
        )
        # Another router that follows the same file may have been faster.
        left = plan_rollouts(contents, self._admin.concerning("file", contents.wanted))
        return {n: why for n, why in errors.items() if n in left.roll_out or n in left.end}


def read_file(path: Path, default_source: str) -> FileContents:
    """Reads the present contents of the file, or the reason why they are unknown."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return unreadable(f"it cannot be read: {error.strerror}")
    return read(data, default_source)
