"""A time limit that holds even where the awaited code ignores its cancellation."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The result of `work`. Raises TimeoutError when it is late: by half, if this loop was, too.

    Work that is late, or whose caller is cancelled, is cancelled and left to end by itself.

    A client that is cancelled while it connects may go on until its own time is over, or answer
    with its own error. `asyncio.timeout` would wait for it, and lose the cancellation.
    """
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    due = loop.time() + timeout_s
    try:
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
        if not done and loop.time() > due + timeout_s / 5:
            # It was this loop that was late: the answer may lie there unread.
            done, _ = await asyncio.wait((task,), timeout=timeout_s / 2)
    except asyncio.CancelledError:
        _leave(task)
        raise
    if not done:
        _leave(task)
        raise TimeoutError
    return task.result()


def _leave(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    task.add_done_callback(_ended)


def _ended(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for the result
