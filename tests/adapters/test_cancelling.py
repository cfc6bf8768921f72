"""A cancellation survives code that swallows it."""

import asyncio
import contextlib

import pytest

from adapters.cancelling import cancellation_kept


async def swallow(fails: bool) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    if fails:
        raise OSError


@pytest.mark.parametrize("fails", [False, True])
async def test_a_swallowed_cancellation_is_raised_after_all(fails: bool) -> None:
    async def work() -> None:
        with contextlib.suppress(OSError), cancellation_kept():
            await swallow(fails)
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_timeouts_and_errors_are_what_they_were() -> None:
    with pytest.raises(TimeoutError), cancellation_kept():
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()
    with pytest.raises(ConnectionResetError), cancellation_kept():
        raise ConnectionResetError

    async def late() -> None:
        async with asyncio.timeout(0.001):
            with cancellation_kept():
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await late()


async def test_what_was_cancelled_before_may_still_clean_up() -> None:
    done = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with cancellation_kept():
                await asyncio.sleep(0)
            done.set()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
