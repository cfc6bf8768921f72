"""How much begins in one iteration of the event loop: little, however much has come.

Each step of all would else come before the next step of any, and of a thousand requests that come
at once the first would reach a worker when the last does.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any


def caller_of(scope: Mapping[str, Any]) -> tuple[str, bytes]:
    """Finds the caller whose turn a request takes, before it is known whether its key is good."""
    host, _ = scope.get("client") or ("", 0)
    return host, next((value for name, value in scope["headers"] if name == b"authorization"), b"")


class Intake:
    """Lets work begin: at most `at_once` pieces in an iteration. Callers take turns, and each one's
    work begins in the order in which it came.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once  # who comes now and may begin in this iteration
        self._woken = 0  # who begin in the next one
        # In order: the caller whose turn it is.
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}

    async def enter(self, caller: Hashable) -> None:
        """Returns when this request of the caller's may begin."""
        if not self._may_begin():
            turn = asyncio.get_running_loop().create_future()
            self._wait(caller, partial(_wake, turn))
            await turn

    def begin(self, caller: Hashable, work: Callable[[], None]) -> None:
        """Does this piece of the caller's work, now or in a later iteration."""
        if self._may_begin():
            work()
        else:
            self._wait(caller, work)

    def _may_begin(self) -> bool:
        if self._left == self._at_once:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        may_begin = self._left > 0
        self._left -= may_begin
        return may_begin

    def _wait(self, caller: Hashable, work: Callable[[], None]) -> None:
        self._waiting.setdefault(caller, deque()).append(work)

    def _next_iteration(self) -> None:
        left, self._left, self._woken = self._at_once - self._woken, 0, 0
        try:
            while self._waiting and self._woken < self._at_once:
                self._woken += 1
                self._pop()()
        finally:
            self._left = 0 if self._woken else left  # nobody overtakes them
            if self._left < self._at_once:
                asyncio.get_running_loop().call_soon(self._next_iteration)

    def _pop(self) -> Callable[[], None]:
        caller, line = next(iter(self._waiting.items()))
        work = line.popleft()
        del self._waiting[caller]
        if line:
            self._waiting[caller] = line  # behind the others
        return work


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # else its request was cancelled
        turn.set_result(None)
