"""Makes the registrations as operators declare them outside of the API, while that changes."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from loraplex.adapters.errors import AdapterError
from loraplex.router.file_stamp import Stamp, stamp_of
from loraplex.router.names.registration import Origin, RegistrationRequest
from loraplex.router.names.served import OwnedName
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
from loraplex.router.operations.rollouts import Rollouts

log = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_S = 30.0
# How long a router's first requests wait for names whose sources are slow.
NAMES_WAIT_S = 10.0
_AT_ONCE = 8


class DeclarationWatch(ABC):
    """Follows the declarations of one origin. errors: by name; what they are about stays as it was.
    place: where the declarations stand, for people. clock: seconds.

    applied: set once every declaration has been tried, or after `NAMES_WAIT_S`. Requests for a name
    that is missing by then get an error that says so. pause_s: from one look to the next.
    """

    origin: ClassVar[Origin]
    option: ClassVar[str]

    def __init__(self, place: str, admin: AdapterAdmin, clock: Callable[[], float]) -> None:
        self.errors: dict[OwnedName, str] = {}
        self.applied = asyncio.Event()
        self.pause_s = POLL_S
        self._place = place
        self._admin = admin
        self._clock = clock
        self._tried_at: float | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)

    @abstractmethod
    async def poll(self) -> None:
        """Does what is to be done if something has changed, or failed a while ago."""

    @property
    def problems(self) -> list[str]:
        """Faults of the declarations, in words for people."""
        return [f"{str(name) or self._place}: {why}" for name, why in sorted(self.errors.items())]

    async def run(self) -> None:
        """Applies changes until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self.pause_s)

    @property
    def _is_due(self) -> bool:
        """Whether all is to be tried for the first time, or what failed once more."""
        if self._tried_at is None:
            return True
        return bool(self.errors) and self._clock() - self._tried_at >= RETRY_S

    async def _change(
        self, register: Sequence[RegistrationRequest], *others: tuple[OwnedName, Awaitable[object]]
    ) -> dict[OwnedName, str]:
        """Carries changes of names out, all at once. Returns problems by name."""
        if not self.applied.is_set():
            asyncio.get_running_loop().call_later(NAMES_WAIT_S, self.applied.set)
        self._admin.aliases.expected.update(request.name for request in register)
        failed = await self._do(
            *((request.name, self._register(request)) for request in register), *others
        )
        self.applied.set()
        return failed

    async def _do(self, *work: tuple[OwnedName, Awaitable[object]]) -> dict[OwnedName, str]:
        """Do the work of all names at once. Returns problems by name."""
        problems = await asyncio.gather(*(self._try(*one) for one in work))
        return {
            name: problem
            for (name, _), problem in zip(work, problems, strict=True)
            if problem is not None
        }

    async def _register(self, request: RegistrationRequest) -> None:
        """Registers what is declared. Raises AdapterError, which the name then shows."""
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
                self._admin.aliases.expected.discard(name)
        return None

    def _report(self, errors: dict[OwnedName, str]) -> None:
        """Logs each error once, as long as it stays the same."""
        for name, why in errors.items():
            if self.errors.get(name) != why:
                what = f"adapter {name}" if str(name) else "it is left as it was"
                log.error("%s: %s: %s", self._place, what, why)
        self.errors = errors


class Declarations:
    """Runs all watches of a router. names_known: set once each has tried its declarations."""

    def __init__(self, watches: Iterable[DeclarationWatch], names_known: asyncio.Event) -> None:
        self._watches = tuple(watches)
        self._names_known = names_known
        if self._watches:
            names_known.clear()

    @property
    def problems(self) -> list[str]:
        return [problem for one in self._watches for problem in one.problems]

    @property
    def why_not_applied(self) -> str | None:
        """The reason why names may be missing still; None = they are known."""
        late = (one.option for one in self._watches if not one.applied.is_set())
        option = next(late, None)
        return None if option is None else f"the adapters of {option} are being checked"

    def broken(self, origin: Origin) -> int:
        """Declarations of an origin that are not as they should be."""
        return sum(len(one.errors) for one in self._watches if one.origin == origin)

    async def run(self) -> None:
        """Watches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._watches:
                tasks.create_task(one.run())
            for one in self._watches:
                await one.applied.wait()
            self._names_known.set()


def _reason(error: AdapterError) -> str:
    reasons = [str(v) for v in error.violations]
    return "; ".join(reasons) or error.message


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
