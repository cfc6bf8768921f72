"""The sequences that an engine has begun, in memory that outlives the engine. Pure."""

_KEYS = 4096
_COUNT, _ANY, _FIRST = 0, 1, 2
_NO_KEY = -1


class BegunSequences:
    """Written by the step loop, read by the worker once the engine is dead. A step of streams that
    go on costs nothing.

    memory: `NBYTES` that both map, zeros at first. The newest keys stand there. An older sequence
    counts as one that waits: most have a token by then, or have ended.
    """

    NBYTES = 8 * (_FIRST + _KEYS)

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("q")

    def begin(self, key: int) -> None:
        """Note a sequence before anything is done for it. key: the worker's number of it."""
        words = self._words
        count = words[_COUNT]
        words[_FIRST + count % _KEYS] = key
        words[_COUNT] = count + 1

    def take_back(self) -> None:
        """Forget the newest key: the sequence waits."""
        words = self._words
        count = words[_COUNT] - 1
        words[_FIRST + count % _KEYS] = _NO_KEY
        words[_COUNT] = count

    def mind_all(self, whether: bool) -> None:
        """Note whether the work at hand may be about any sequence, also about one that waits."""
        self._words[_ANY] = whether

    def keys(self) -> frozenset[int] | None:
        """Keys of what was begun; None = the work at hand may have been about any sequence."""
        if self._words[_ANY]:
            return None
        count = min(self._words[_COUNT], _KEYS)
        return frozenset(self._words[_FIRST : _FIRST + count]) - {_NO_KEY}

    def clear(self) -> None:
        self._words[_COUNT] = self._words[_ANY] = 0
