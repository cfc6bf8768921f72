"""Nobody waits for code that does not let itself be cancelled."""

import asyncio
import contextlib

import pytest

from loraplex.adapters.common.bounded import bounded


class Stubborn:
    """Work that goes on when it is cancelled, until it is released."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.end = asyncio.Event()

    async def work(self) -> None:
        self.begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self.end.wait()
        self.cancelled.set()
        await self.end.wait()
        raise OSError("nobody is told")


async def test_late_work_is_left_behind() -> None:
    stubborn = Stubborn()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bounded(stubborn.work(), 0.001), 240)
    await stubborn.cancelled.wait()
    stubborn.end.set()


async def test_who_is_cancelled_ends_at_once() -> None:
    stubborn = Stubborn()
    task = asyncio.create_task(bounded(stubborn.work(), 60))
    await stubborn.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 240)
    await stubborn.cancelled.wait()
    stubborn.end.set()


async def test_results_and_errors_pass() -> None:
    async def good() -> int:
        return 7

    async def bad() -> None:
        raise ConnectionResetError

    assert await bounded(good(), 60) == 7
    with pytest.raises(ConnectionResetError):
        await bounded(bad(), 60)
