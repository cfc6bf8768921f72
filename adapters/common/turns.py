"""Turns of work that costs processor time before a request's first token. Pure.

Who asks for much waits in a line of its own, and holds nobody else up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

W = TypeVar("W")


class LineFull(Exception):
    """Too many of the same tenant wait already."""


class Room(NamedTuple):
    """Bounds the work of one kind that runs at once, in a unit of the kind's own.

    size: of all work; a larger piece counts as `size`. of_one: of one tenant, and of all batches
    together; below `size` it keeps room for others. A tenant's only piece may be larger.
    line: pieces that wait in one line.
    """

    size: int
    of_one: int
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class WorkTurn(Generic[W]):
    """One piece of work that has or awaits its turn. work: its holder's own."""

    kind: str
    tenant: str
    is_batch: bool
    size: int
    work: W


class _Line(NamedTuple):
    is_batch: bool
    tenant: str


class Turns(Generic[W]):
    """Decides whose work begins next. Each tenant has a line for live requests and one for batches,
    of each kind of work.

    Lines take turns. A tenant runs one piece of work at a time while others of its class wait, and
    batches begin when no live request waits. rooms: by kind.
    """

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        self._rooms = dict(rooms)
        # In order: the line whose turn it is, and in a line the turn that came first.
        self._lines: dict[str, dict[_Line, dict[WorkTurn[W], None]]] = {kind: {} for kind in rooms}
        self._running: dict[str, set[WorkTurn[W]]] = {kind: set() for kind in rooms}

    def join(self, turn: WorkTurn[W]) -> None:
        """Puts a turn at the end of its line. Raises LineFull."""
        line = self._lines[turn.kind].setdefault(_line_of(turn), {})
        if len(line) >= self._rooms[turn.kind].line:
            raise LineFull
        line[turn] = None

    def begin(self) -> list[WorkTurn[W]]:
        """Begins all work whose turn it is. The work runs from now on, until it leaves."""
        begun = []
        for kind, lines in self._lines.items():
            while (turn := self._next(kind)) is not None:
                self._running[kind].add(turn)
                rest = lines.pop(_line_of(turn))
                del rest[turn]
                if rest:
                    lines[_line_of(turn)] = rest  # behind the others
                begun.append(turn)
        return begun

    def leave(self, turn: WorkTurn[W]) -> None:
        """Ends a turn's work, or its wait."""
        self._running[turn.kind].discard(turn)
        lines = self._lines[turn.kind]
        line = lines.get(_line_of(turn), {})
        line.pop(turn, None)
        if not line:
            lines.pop(_line_of(turn), None)

    def _next(self, kind: str) -> WorkTurn[W] | None:
        lines, size = self._lines[kind], self._rooms[kind].size
        free = size - sum(min(turn.size, size) for turn in self._running[kind])
        waiting = [name for name in lines if not name.is_batch] or list(lines)
        for name in waiting:
            turn = next(iter(lines[name]))
            if self._may_begin(turn, is_alone=len(waiting) == 1):
                return turn if min(turn.size, size) <= free else None  # no smaller one overtakes it
        return None

    def _may_begin(self, turn: WorkTurn[W], is_alone: bool) -> bool:
        running = self._running[turn.kind]
        if not is_alone and any(other.tenant == turn.tenant for other in running):
            return False
        beside = sum(
            other.size
            for other in running
            if other.tenant == turn.tenant or (turn.is_batch and other.is_batch)
        )
        return not beside or beside + turn.size <= self._rooms[turn.kind].of_one


def _line_of(turn: WorkTurn[W]) -> _Line:
    return _Line(turn.is_batch, turn.tenant)
