"""Keeps the registered adapters as the operator's file says, while the file changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container
from pathlib import Path

from loraplex.adapters.errors import AdapterError
from loraplex.router.file_stamp import Stamp, stamp_of
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.names.registration import RegistrationRequest
from loraplex.router.operations.adapters_file import (
    BY,
    MAX_FILE_BYTES,
    WHOLE,
    FileContents,
    plan,
    plan_rollouts,
    read,
    unreadable,
)
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.operations.rollouts import Rollouts

log = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_S = 30.0
# How long a router's first requests wait for names whose sources are slow.
NAMES_WAIT_S = 10.0
_AT_ONCE = 8


class AdaptersFile:
    """Watches the adapters file and applies its changes. errors: by entry, or WHOLE; what they are
    about stays as it was. clock: seconds.

    applied: set once every entry has been tried, or after `NAMES_WAIT_S`. Requests for a name that
    is missing by then get an error that says so. New versions of a name are not waited for: it
    means its `ref` until they are there.
    """

    def __init__(
        self,
        path: Path,
        admin: AdapterAdmin,
        rollouts: Rollouts,
        default_source: str,
        clock: Callable[[], float],
        applied: asyncio.Event,
    ) -> None:
        self.errors: dict[OwnedName, str] = {}
        self.applied = applied
        self._path = path
        self._admin = admin
        self._rollouts = rollouts
        self._default_source = default_source
        self._clock = clock
        self._stamp: Stamp | None = None
        self._tried_at: float | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)

    @property
    def problems(self) -> list[str]:
        """Faults of the file, in words for people."""
        return [f"{str(name) or self._path}: {why}" for name, why in sorted(self.errors.items())]

    async def run(self) -> None:
        """Applies changes of the file until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Does what is to be done if the file has changed, or something failed a while ago."""
        if not self._admin.workers.ready:
            return
        stamp = await asyncio.to_thread(stamp_of, self._path)
        now = self._clock()
        is_due = self._tried_at is None or (self.errors and now - self._tried_at >= RETRY_S)
        if stamp == self._stamp and not is_due:
            return
        self._stamp, self._tried_at = stamp, now
        contents = await asyncio.to_thread(read_file, self._path, self._default_source)
        self._report(await self._reconcile(contents))

    async def _reconcile(self, contents: FileContents) -> dict[OwnedName, str]:
        """Bring names in line with the file. Returns problems by entry."""
        admin = self._admin
        if contents.is_readable:
            admin.claim(contents.names)
        todo = plan(contents, admin.all())
        if not self.applied.is_set():
            asyncio.get_running_loop().call_later(NAMES_WAIT_S, self.applied.set)
        for request, why in contents.not_understood.items():
            admin.declare_broken(request, why)
        admin.expect(request.name for request in todo.register)
        failed = await self._do(
            *((request.name, self._register(request)) for request in todo.register),
            *((name, admin.pin(name)) for name in todo.pin),
            *((name, admin.unpin(name)) for name in todo.unpin),
            *((name, admin.delete(name)) for name in todo.delete),
        )
        self.applied.set()
        errors = {**contents.errors, **todo.errors, **failed}
        return {**errors, **await self._reconcile_rollouts(contents, errors)}

    async def _reconcile_rollouts(
        self, contents: FileContents, failed: Container[OwnedName]
    ) -> dict[OwnedName, str]:
        """Bring rollouts in line with the file. Returns problems by entry.

        failed: names that are not as the file says.
        """
        there = [r for r in self._admin.all() if r.key not in failed]
        todo = plan_rollouts(contents, there)
        errors = await self._do(
            *(
                (name, self._rollouts.roll_out(name, request))
                for name, request in todo.roll_out.items()
            ),
            *((name, self._rollouts.end(name, BY, by_file=True)) for name in todo.end),
        )
        # Another router that follows the same file may have been faster.
        left = plan_rollouts(contents, self._admin.all())
        return {n: why for n, why in errors.items() if n in left.roll_out or n in left.end}

    async def _do(self, *work: tuple[OwnedName, Awaitable[object]]) -> dict[OwnedName, str]:
        """Do the work of all names at once. Returns problems by name."""
        problems = await asyncio.gather(*(self._try(*one) for one in work))
        return {
            name: problem
            for (name, _), problem in zip(work, problems, strict=True)
            if problem is not None
        }

    async def _register(self, request: RegistrationRequest) -> None:
        """Registers an entry of the file. Raises AdapterError; then the name is known by what is
        wrong with it.
        """
        try:
            await self._admin.register(request)
        except AdapterError as error:
            self._admin.declare_broken(request, _reason(error))
            raise

    async def _try(self, name: OwnedName, operation: Awaitable[object]) -> str | None:
        async with self._slots:
            try:
                await operation
            except AdapterError as error:
                return _reason(error)
            finally:
                self._admin.settled(name)
        return None

    def _report(self, errors: dict[OwnedName, str]) -> None:
        """Logs each error once, as long as it stays the same."""
        for name, why in errors.items():
            if self.errors.get(name) != why:
                what = f"adapter {name}" if name != WHOLE else "it is left as it was"
                log.error("adapters file %s: %s: %s", self._path, what, why)
        self.errors = errors


def _reason(error: AdapterError) -> str:
    reasons = [f"{v.where}: {v.message}" for v in error.violations]
    return "; ".join(reasons) or error.message


def read_file(path: Path, default_source: str) -> FileContents:
    """Reads the present contents of the file, or the reason why they are unknown."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return unreadable(f"it cannot be read: {error.strerror}")
    return read(data, default_source)
