"""A request's place is given back, whatever happens while it is taken."""

import asyncio
import time

import pytest

from loraplex.router.policy.quota import Ask, Limits, Subject, Verdict
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.store import Settlement, StoreDown
from loraplex.router.tenancy.metering import Admission, Admitted

SUBJECTS = (Subject("key:k", Limits(concurrency=1, tokens_per_minute=100)),)


class SlowStore(MemoryStore):
    """It takes what it is asked for at once, and answers when it may. settled: its reports."""

    def __init__(self) -> None:
        super().__init__(time.time)
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_down = False
        self.settled: list[Settlement] = []

    async def admit(self, ask: Ask) -> Verdict:
        if self.is_down:
            raise StoreDown
        verdict = await super().admit(ask)
        await self.answers.wait()
        return verdict

    async def settle(self, settlement: Settlement) -> tuple[int, int]:
        self.settled.append(settlement)
        return await super().settle(settlement)


def ask(lease: str, tokens: int = 0) -> Ask:
    return Ask("acme", SUBJECTS, lease, tokens)


async def taken(admission: Admission, asked: Ask) -> Admitted:
    answer = await admission.admit(asked)
    assert isinstance(answer, Admitted), answer
    return answer


async def idle(store: SlowStore, count: int) -> None:
    async with asyncio.timeout(240):
        while len(store.settled) < count:  # noqa: ASYNC110 - settlements have no signal
            await asyncio.sleep(0)


async def test_who_leaves_while_asking_keeps_no_place() -> None:
    store = SlowStore()
    admission = Admission(store, lambda: True, "closed", "router")
    store.answers.clear()
    asking = asyncio.create_task(admission.admit(ask("one")))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    store.answers.set()
    await idle(store, 1)
    await taken(admission, ask("two"))


async def test_a_place_lies_in_one_store() -> None:
    """The shared store goes away between the place and the tokens."""
    store = SlowStore()
    admission = Admission(store, lambda: not store.is_down, "local-share", "router")
    first = await taken(admission, ask("one"))
    store.is_down = True
    second = await taken(admission, ask("one", 40))
    assert second.store is not first.store
    await idle(store, 1)
    store.is_down = False
    admission.settle(second, 10)
    await admission.close()
    third = await taken(admission, ask("two", 100))
    assert third.store is store
    assert [(s.ask.lease, s.used) for s in store.settled] == [("one", 0)]
