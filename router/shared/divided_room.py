"""Room that owners share: where it is full, the owner of most gives up its oldest key. Pure."""

from itertools import islice


class DividedRoom:
    """Keys by owner, each owner's oldest first. None push out those of an owner with fewer."""

    def __init__(self) -> None:
        self._owned: dict[str, dict[str, None]] = {}
        self._ends: dict[str, tuple[str, float]] = {}  # by key, from the oldest on: whose, and when

    def __len__(self) -> int:
        return len(self._ends)

    def put(self, owner: str, key: str, until: float) -> None:
        """Notes a key as the newest. until: when it needs no room any more."""
        self.drop(key)
        self._owned.setdefault(owner, {})[key] = None
        self._ends[key] = owner, until

    def drop(self, key: str) -> None:
        """Forgets a key, if it is there."""
        if key not in self._ends:
            return
        owner, _ = self._ends.pop(key)
        del self._owned[owner][key]
        if not self._owned[owner]:
            del self._owned[owner]

    def expired(self, now: float, most: int) -> list[str]:
        """Takes out those of the oldest keys, at most so many, whose time is over."""
        over = [key for key, (_, until) in islice(self._ends.items(), most) if until <= now]
        for key in over:
            self.drop(key)
        return over

    def pop(self) -> str:
        """Takes out the oldest key of the owner that has most. There must be one."""
        owner = max(self._owned, key=lambda owner: len(self._owned[owner]))
        key = next(iter(self._owned[owner]))
        self.drop(key)
        return key
