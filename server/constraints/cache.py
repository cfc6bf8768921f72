"""A bounded cache with text keys that drops the least recently used entry. Pure."""

from typing import Generic, TypeVar

V = TypeVar("V")


class BoundedCache(Generic[V]):
    """max_bytes: bound on the bytes of all keys in UTF-8."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._values: dict[str, V] = {}  # the last used last
        self._bytes = 0

    def get(self, key: str) -> V | None:
        if key not in self._values:
            return None
        value = self._values[key] = self._values.pop(key)
        return value

    def put(self, key: str, value: V) -> None:
        """Keep a value. A key of more than `max_bytes` is not kept."""
        if key in self._values:
            self._drop(key)
        self._values[key] = value
        self._bytes += _size(key)
        while len(self._values) > self._max_entries or self._bytes > self._max_bytes:
            self._drop(next(iter(self._values)))

    def remove(self, key: str) -> None:
        if key in self._values:
            self._drop(key)

    def _drop(self, key: str) -> None:
        del self._values[key]
        self._bytes -= _size(key)


def _size(key: str) -> int:
    return len(key.encode("utf-8", "surrogatepass"))
