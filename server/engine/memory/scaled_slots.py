"""Slots of the device table for adapters whose requests bring a scale of their own. Pure."""

from dataclasses import dataclass

from loraplex.server.engine.plan import ScaledSlot


@dataclass(slots=True)
class _Use:
    key: tuple[int, float]
    users: int = 0


class ScaledSlots:
    """A slot stands for an adapter's slot and a scale, as long as a running sequence uses it.

    A sequence uses one slot at most, so there are as many slots as rows, and none is waited for.
    """

    def __init__(self, first: int, count: int) -> None:
        """Take `count` slots from `first` on, behind those of adapters as they are."""
        self._first = first
        self._free = list(range(first + count - 1, first - 1, -1))
        self._slots: dict[tuple[int, float], int] = {}
        self._uses: dict[int, _Use] = {}

    def take(self, source_slot: int, scale: float) -> tuple[int, ScaledSlot | None]:
        """The slot for one more sequence, and how to fill it if it is not filled yet."""
        key = (source_slot, scale)
        slot, news = self._slots.get(key), None
        if slot is None:
            slot = self._slots[key] = self._free.pop()
            self._uses[slot] = _Use(key)
            news = ScaledSlot(slot, source_slot, scale)
        self._uses[slot].users += 1
        return slot, news

    def give_back(self, slot: int) -> None:
        """End the use of a slot by one sequence that no step in flight contains.

        The slot is free when no other sequence uses it. Slots without a scale are left alone.
        """
        if slot < self._first:
            return
        use = self._uses[slot]
        use.users -= 1
        if not use.users:
            del self._uses[slot], self._slots[use.key]
            self._free.append(slot)
