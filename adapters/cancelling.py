"""Holds libraries to it that a task which is cancelled ends."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cancellation_kept() -> Iterator[None]:
    """A cancellation that comes inside is not lost, whatever the code inside makes of it.

    A client that is cancelled while it connects or cleans up may answer with an error of its own,
    or not at all; its task would then run on for ever.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    except Exception as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
