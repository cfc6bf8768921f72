"""Work that all who want it at the same time share."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


class SharedTasks(Generic[_Key, _Result]):
    """One task for each key: who comes meanwhile shares its end. It outlives those who leave."""

    def __init__(self) -> None:
        self._tasks: dict[_Key, asyncio.Task[_Result]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: _Key) -> bool:
        return key in self._tasks

    async def run(self, key: _Key, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Waits for a key's task, which begins with `work` if there is none. Raises as that."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._ended, key))
        return await asyncio.shield(task)

    def _ended(self, key: _Key, task: asyncio.Task[_Result]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # every waiter may have left: it counts as seen
