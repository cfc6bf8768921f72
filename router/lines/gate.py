"""Where the callers of a batch wait: for room, for a pause to end, or for the batch's stop."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from loraplex.router.lines.pace import SendPace


class Gate:
    """Lets callers pass as `pace` allows. After `stop` nobody waits, and nobody passes."""

    def __init__(self, pace: SendPace) -> None:
        self.pace = pace
        self.is_stopped = False
        self._changed = asyncio.Event()

    def stop(self) -> None:
        self.is_stopped = True
        self.wake()

    def wake(self) -> None:
        """Lets whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(self) -> bool:
        """Waits until a line may be sent. False = the batch stops."""
        while not self.is_stopped:
            now = time.monotonic()
            if self.pace.has_room(now):
                self.pace.sent()
                return True
            await self._until_changed(self.pace.wait_s(now) or None)
        return False

    async def until(self, condition: Callable[[], bool]) -> bool:
        """Waits until the condition holds. False = the batch stops."""
        while not self.is_stopped and not condition():
            await self._until_changed(None)
        return not self.is_stopped

    async def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_stopped and (left := end - time.monotonic()) > 0:
            await self._until_changed(left)

    async def _until_changed(self, limit_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), limit_s)
