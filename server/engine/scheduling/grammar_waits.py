"""Sequences that wait until their constraint is made. Pure."""

from loraplex.server.constraints.wishes import ConstraintWish
from loraplex.server.engine.scheduling.sequence import Sequence, State


class GrammarWaits:
    """The sequences in state NEEDS_GRAMMAR."""

    def __init__(self) -> None:
        self._wishes: list[ConstraintWish] = []
        self._parked: dict[int, Sequence] = {}
        self._abandoned: list[int] = []

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, sequence: Sequence) -> None:
        sequence.move(State.NEEDS_GRAMMAR)
        request = sequence.request
        self._parked[sequence.key] = sequence
        wish = ConstraintWish(
            sequence.key,
            request.sampling,
            request.accepted_ids,
            request.vocab_size,
            request.tenant,
            sequence.is_background,
        )
        self._wishes.append(wish)

    def unpark(self, key: int) -> Sequence | None:
        """Remove and return the sequence; None if it has ended."""
        return self._parked.pop(key, None)

    def abandon(self, key: int) -> None:
        """The sequence ends; its constraint may not have been made."""
        if self._parked.pop(key, None) is not None:
            self._abandoned.append(key)

    def take_abandoned(self) -> list[int]:
        """Keys since the last call."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def take_wishes(self) -> list[ConstraintWish]:
        """Wishes since the last call, without those of sequences that have ended."""
        wishes, self._wishes = self._wishes, []
        return [wish for wish in wishes if wish.key in self._parked]
