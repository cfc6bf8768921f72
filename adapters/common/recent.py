"""A bounded map that keeps the newest entries."""

import threading
from typing import Generic, TypeVar

from loraplex.adapters.common.newest import NewestKept

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """Holds at most `limit` values; the one that was not put in or looked up for longest goes.

    Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._values = NewestKept[_Key, _Value](limit)

    def put(self, key: _Key, value: _Value) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: _Key) -> _Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)
