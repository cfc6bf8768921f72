"""The constrained sequences that a step takes, so that it waits little for their masks. Pure.

A step fills cheap masks itself. The others are filled aside: a step takes such a sequence once its
mask is there.
"""

from collections import abc, defaultdict

from loraplex.server.constraints.constraint import Constraint
from loraplex.server.constraints.wishes import AsideWish
from loraplex.server.engine.scheduling.sequence import Sequence

# Of a step's time, for its masks; and at least so much, so that cheap masks need no turn.
_SHARE = 0.125
_LEAST_S = 0.004
_LATE = 2.0  # times the share: what is not there by then waits for a later step


class MaskShare:
    """Share out the time that a step waits for masks. threads: that fill masks of a step."""

    def __init__(self) -> None:
        self.threads = 1
        self._step_s = 0.0
        self._left = 0.0
        self._aside = set[Sequence]()
        self._wishes = list[AsideWish]()

    @property
    def share_s(self) -> float:
        """How long a step is to wait for masks."""
        return max(_LEAST_S, _SHARE * self._step_s)

    @property
    def late_s(self) -> float:
        """How long a step waits at most."""
        return _LATE * self.share_s

    def begin_plan(self, running: abc.Iterable[Sequence], step_s: float) -> None:
        """Share out the time for masks of a new plan. Each tenant has an equal part of what the
        step's masks may cost, and the rest of those who need less. running: in order of
        precedence. step_s: of a step without prompts.
        """
        self._step_s = step_s
        self._left = self.threads * self.share_s
        self._aside.clear()
        lines = defaultdict[str, list[tuple[Sequence, float]]](list)
        for sequence in running:
            constraint = sequence.constraint
            if constraint is None or constraint.is_ready:
                continue
            if constraint.is_busy:
                self._aside.add(sequence)
            else:
                lines[sequence.request.tenant].append((sequence, _cost(constraint)))
        parts = [_fitting(line, self._left / len(lines)) for line in lines.values()]
        self._left -= sum(spent for spent, _ in parts)
        spent, rest = _fitting([each for _, rest in parts for each in rest], self._left)
        self._left -= spent
        self._aside.update(sequence for sequence, _ in rest)

    def takes(self, sequence: Sequence) -> bool:
        """Whether the step that is being planned can have its next token. If not, its mask is
        filled aside."""
        constraint = sequence.constraint
        if constraint is None or sequence not in self._aside:
            return True
        if not (sequence.pending or constraint.is_busy):
            constraint.is_busy = True
            tenant, is_batch = sequence.request.tenant, sequence.is_background
            self._wishes.append(AsideWish(constraint, tenant, is_batch))
        return False

    def admits(self, sequence: Sequence) -> bool:
        """Whether the step can have the next token of a sequence without a row, as `takes`."""
        constraint = sequence.constraint
        if constraint is not None and not constraint.is_ready:
            if constraint.is_busy or _cost(constraint) > self._left:
                self._aside.add(sequence)
            else:
                self._left -= constraint.mask_s
        return self.takes(sequence)

    def room_for_draft(self, sequence: Sequence, room: int) -> int:
        """The part of `room` tokens for whose masks the step has time."""
        constraint = sequence.constraint
        if constraint is None or not room or not constraint.mask_s:
            return room
        return 0 if constraint.is_late else min(room, int(self._left / constraint.mask_s))

    def add_draft(self, sequence: Sequence, draft: abc.Sized) -> None:
        """Count the draft's masks to the step: the time that they take is no longer left."""
        if sequence.constraint is not None:
            self._left -= len(draft) * sequence.constraint.mask_s

    def take_wishes(self) -> list[AsideWish]:
        """Masks that are to be filled aside, since the last call."""
        wishes, self._wishes = self._wishes, []
        return wishes


def _fitting(
    line: list[tuple[Sequence, float]], room: float
) -> tuple[float, list[tuple[Sequence, float]]]:
    """The cost of the sequences that fit in together, and the other sequences."""
    spent, rest = 0.0, []
    for sequence, cost in line:
        if spent + cost <= room:
            spent += cost
        else:
            rest.append((sequence, cost))
    return spent, rest


def _cost(constraint: Constraint) -> float:
    return float("inf") if constraint.is_late else constraint.mask_s
