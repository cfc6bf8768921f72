"""Turns of costly work that callers await on the event loop."""

import asyncio
from collections.abc import Mapping

from loraplex.adapters.common.turns import Room, Turns, WorkTurn

AwaitedTurn = WorkTurn[asyncio.Future[None]]


class AwaitedTurns:
    """Carries out `Turns` for callers on one event loop. rooms: by kind."""

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        self._turns: Turns[asyncio.Future[None]] = Turns(rooms)

    async def enter(self, kind: str, size: int, tenant: str, is_batch: bool) -> AwaitedTurn:
        """Returns when work may begin; `leave` of the result ends its turn. Raises LineFull."""
        has_begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn = WorkTurn(kind, tenant, is_batch, size, has_begun)
        self._turns.join(turn)
        self._begin()
        try:
            await has_begun
        except asyncio.CancelledError:
            self.leave(turn)
            raise
        return turn

    def leave(self, turn: AwaitedTurn) -> None:
        """Ends a turn, and begins those that now may."""
        self._turns.leave(turn)
        self._begin()

    def _begin(self) -> None:
        for turn in self._turns.begin():
            if not turn.work.done():  # else its caller has left, and says so soon
                turn.work.set_result(None)
