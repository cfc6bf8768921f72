"""Asks whether a caller's quotas admit a request: the shared store, or this router's own counts.

While the shared store does not answer, the operator's mode holds. `open` counts nothing, `closed`
admits nobody who has quotas, `local-share` counts here, against this router's share of the limits.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.call import RequestError
from loraplex.router.policy.quota import Ask, Reason, Standing, Subject, Verdict, share
from loraplex.router.shared.every import every
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.steady_clock import SteadyClock
from loraplex.router.shared.store import Settlement, Store, StoreDown

OutageMode = Literal["open", "closed", "local-share"]
Mode = Literal["shared", "open", "closed", "local-share"]
MODES: tuple[Mode, ...] = ("shared", "open", "closed", "local-share")

LEASE_MS = 60_000  # after which a router that died holds no places any more
RENEW_S = 20.0
ROUTER_LEASE_S = 15.0
_ENLIST_S = 5.0
ROUTERS = "routers"  # those that are there, by their ids
MAX_BACKLOG = 1 << 14
MAX_REMEMBERED = 4096


class Admitted(msgspec.Struct, frozen=True):
    """A request that holds its share until it is settled. store: where it is counted."""

    ask: Ask
    verdict: Verdict
    store: Store


class Admission:
    """Admits requests within the limits of their key and tenant. is_up: whether the shared store
    answers, as far as is known. clock: Unix seconds that do not jump.

    refusals: how often each limit kept a request out.
    """

    def __init__(
        self,
        store: Store,
        is_up: Callable[[], bool],
        outage: OutageMode,
        router_id: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.routers = 1
        self.refusals: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._store = store
        self._is_up = is_up
        self._outage: OutageMode = outage
        self._router_id = router_id
        self._local = MemoryStore(clock or SteadyClock())
        self._live: dict[str, Admitted] = {}
        # Requests a minute come back with time alone: until then the answer stays the same.
        self._used_up = NewestKept[tuple[Subject, ...], tuple[float, Verdict]](MAX_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def mode(self) -> Mode:
        return "shared" if self._is_up() else self._outage

    def known_refusal(self, subjects: tuple[Subject, ...]) -> Verdict | None:
        """A refusal that `admit` would still give, as far as is known without asking."""
        until, verdict = self._used_up.get(subjects, (0.0, None))
        left_ms = round(1000 * (until - time.monotonic()))
        if verdict is None or left_ms <= 0:
            return None
        self.refusals["requests"] += 1
        return msgspec.structs.replace(verdict, retry_ms=left_ms)

    async def admit(self, ask: Ask) -> Admitted | Verdict | None:
        """Asks the store to admit a request. A Verdict with a reason when it is refused; None when
        nothing is counted now. What holds its place already takes tokens alone.

        Raises RequestError (unavailable) when the mode is `closed`.
        """
        ask = msgspec.structs.replace(ask, lease_ms=LEASE_MS)
        store, asked = self._store, ask
        try:
            verdict = await store.admit(ask)
        except asyncio.CancelledError:
            if ask.lease not in self._live:  # it may have taken its place
                nothing = tuple(Standing(0, 0, 0, 0, 0) for _ in ask.subjects)
                self.settle(Admitted(ask, Verdict(0, nothing), store), ask.tokens)
            raise
        except StoreDown:
            if self._outage == "open":
                return None
            if self._outage == "closed":
                raise RequestError(
                    "unavailable", "quotas cannot be checked now; try again soon"
                ) from None
            store, asked = self._local, _share_of(ask, self.routers)
            verdict = await store.admit(asked)
        if verdict.reason is not None:
            self.refusals[verdict.reason] += 1
            if verdict.reason == "requests":
                self._remember(ask.subjects, verdict)
            return verdict
        admitted = Admitted(asked, verdict, store)
        held = self._live.get(ask.lease)
        if held is not None and held.store is not store:
            self.settle(held, 0)
        self._live[ask.lease] = admitted
        return admitted

    def _remember(self, subjects: tuple[Subject, ...], verdict: Verdict) -> None:
        self._used_up[subjects] = time.monotonic() + verdict.retry_ms / 1000, verdict

    def settle(self, admitted: Admitted, used: int) -> None:
        """Settles a request, without waiting. Unreported places expire soon; tokens refill."""
        self._live.pop(admitted.ask.lease, None)
        if len(self._tasks) >= MAX_BACKLOG:
            return
        settlement = Settlement(admitted.ask, admitted.verdict, used)
        task = asyncio.create_task(_settle(admitted.store, settlement))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Renews what runs, and shows other routers that this one is there, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(every(RENEW_S, self._renew))
            tasks.create_task(every(_ENLIST_S, self._enlist))

    async def close(self) -> None:
        """Reports ended requests; this router is no longer counted."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreDown):
            await self._store.unlease(ROUTERS, self._router_id)

    async def _renew(self) -> None:
        for store in (self._local, self._store):
            asks = [held.ask for held in self._live.values() if held.store is store]
            if asks:
                await store.renew(asks)

    async def _enlist(self) -> None:
        await self._store.lease(ROUTERS, self._router_id, b"", ROUTER_LEASE_S)
        self.routers = max(1, len(await self._store.leased(ROUTERS)))


async def _settle(store: Store, settlement: Settlement) -> None:
    with contextlib.suppress(StoreDown):
        await store.settle(settlement)


def _share_of(ask: Ask, routers: int) -> Ask:
    subjects = tuple(Subject(s.name, share(s.limits, routers)) for s in ask.subjects)
    return msgspec.structs.replace(ask, subjects=subjects)
