"""Room that owners share: where it is full, the owner of most gives up its oldest key. Pure."""


class DividedRoom:
    """Keys by owner, each owner's from the oldest on. No owner's keys push out those of one that
    has fewer.
    """

    def __init__(self) -> None:
        self._owned: dict[str, dict[str, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, owner: str, key: str) -> None:
        """Notes a key as the newest of its owner's."""
        self.drop(owner, key)
        self._owned.setdefault(owner, {})[key] = None
        self._count += 1

    def drop(self, owner: str, key: str) -> None:
        """Forgets a key, if it is there."""
        owned = self._owned.get(owner, {})
        if key in owned:
            del owned[key]
            self._count -= 1
            if not owned:
                del self._owned[owner]

    def pop(self) -> str:
        """Takes out the oldest key of the owner that has most. There must be one."""
        owner = max(self._owned, key=lambda owner: len(self._owned[owner]))
        key = next(iter(self._owned[owner]))
        self.drop(owner, key)
        return key
