"""How many requests begin in one iteration of the event loop: few, however many have come.

Each step of all would else come before the next step of any, and of a thousand that come at once
the first would reach a worker when the last does.
"""

import asyncio
from collections import deque
from collections.abc import Hashable


class Intake:
    """Lets requests begin: at most `at_once` in an iteration. Callers take turns, and each one's
    requests begin in the order in which they came.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once  # who comes now and may begin in this iteration
        self._woken = 0  # who begin in the next one
        # In order: the caller whose turn it is.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    async def enter(self, caller: Hashable) -> None:
        """Returns when this request of the caller's may begin."""
        loop = asyncio.get_running_loop()
        if self._left == self._at_once:
            loop.call_soon(self._next_iteration)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        await turn

    def _next_iteration(self) -> None:
        self._left, self._woken = self._at_once - self._woken, 0
        while self._waiting and self._woken < self._at_once:
            turn = self._pop()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self._woken += 1
        if self._woken:
            self._left = 0  # nobody overtakes them
        if self._left < self._at_once:
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _pop(self) -> asyncio.Future[None]:
        caller, line = next(iter(self._waiting.items()))
        turn = line.popleft()
        del self._waiting[caller]
        if line:
            self._waiting[caller] = line  # behind the others
        return turn
