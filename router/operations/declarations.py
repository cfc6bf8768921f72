"""Makes the registrations as operators declare them outside of the API, while that changes."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar

from loraplex.adapters.errors import AdapterError
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.names.registration import Origin, RegistrationRequest
from loraplex.router.operations.admin import AdapterAdmin

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
