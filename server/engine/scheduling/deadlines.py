"""The earliest deadline of many sequences. Pure."""

import heapq

# Most sequences end before their deadline. The heap keeps at most this many of them.
_LEFTOVERS = 1000


class Deadlines:
    def __init__(self) -> None:
        self._by_key: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # some sequences in it have ended

    def add(self, key: int, deadline: float) -> None:
        self._by_key[key] = deadline
        heapq.heappush(self._heap, (deadline, key))
        if len(self._heap) > 2 * len(self._by_key) + _LEFTOVERS:
            self._heap = [(at, key) for key, at in self._by_key.items()]
            heapq.heapify(self._heap)

    def discard(self, key: int) -> None:
        """The sequence is over. It need not have a deadline."""
        self._by_key.pop(key, None)

    def next(self) -> tuple[float, int] | None:
        """The earliest deadline and the key of its sequence."""
        while self._heap and self._by_key.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None
