"""Pauses of a process that has to answer at once."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# Allocations between two collections; Python's own 700 are those of a request or two. Collections
# of those that survived come after 3, for 30 ms at most; of all after 300, more than the objects of
# thousands of requests.
_YOUNG_OBJECTS, _SURVIVED, _ALL = 10_000, 3, 100
# A computing thread keeps the interpreter this long. Python's own 5 ms are most of a step.
_SWITCH_S = 0.0005


def shorten_pauses() -> None:
    """Makes garbage collections rare and quick, and threads give way to each other sooner.

    Call this once all lasting objects are built: no collection looks at them any more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _SURVIVED, _ALL)
    sys.setswitchinterval(_SWITCH_S)


class FullCollections:
    """Holds off collections that look at all objects: each stops all threads. Pieces of work that
    build much would have one again and again, each longer than the last.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._before = (0, 0, 0)

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Hold them off until this and all other pieces of such work are over."""
        with self._lock:
            if not self._count:
                self._before = gc.get_threshold()
                gc.set_threshold(*self._before[:2], sys.maxunicode)
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    gc.set_threshold(*self._before)


full_collections = FullCollections()
