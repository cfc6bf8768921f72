"""Work on several items by several threads, for which a step waits only so long."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class SharedWork(Generic[T, R]):
    """Threads take one item after the other, until the work is closed. An item that has been taken
    by then is still done, in vain.

    do: gets an item, and a function that says whether the work is still open. late: gets an item
    that was done in vain, in its thread.
    """

    def __init__(
        self,
        items: Sequence[T],
        do: Callable[[T, Callable[[], bool]], R],
        late: Callable[[T], None],
    ) -> None:
        self._items, self._do, self._late = items, do, late
        self._places = iter(range(len(items)))  # threads share it
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_open = True
        self._taken = set[int]()
        self._results = dict[int, R]()
        self._threads = list[Future[None]]()

    def finish(
        self, threads: Executor, few: int, many: int, wait_s: float
    ) -> tuple[dict[int, R], set[int]]:
        """Do the items by a few threads of a pool, and by many where these take long. Close the
        work after `wait_s`. Returns results by place, and the places of items that are done in
        vain. Raises what an item has raised."""
        begun = 0
        for count in (few, many):
            more = range(begun, min(count, len(self._items)))
            self._threads += [threads.submit(self._run) for _ in more]
            begun = len(self._threads)
            if not begun or self._over.wait(min(wait_s / 2, threading.TIMEOUT_MAX)):
                break
        with self._lock:
            self._is_open = False
        for thread in self._threads:
            if thread.done():
                thread.result()
        return self._results, self._taken - self._results.keys()

    def _run(self) -> None:
        try:
            for place in self._places:
                if not self._take(place):
                    return
                result = self._do(self._items[place], lambda: self._is_open)
                if not self._note(place, result):
                    self._late(self._items[place])
        except BaseException:
            self._over.set()
            raise

    def _take(self, place: int) -> bool:
        with self._lock:
            if self._is_open:
                self._taken.add(place)
            return self._is_open

    def _note(self, place: int, result: R) -> bool:
        """Whether the result still counts."""
        with self._lock:
            if self._is_open:
                self._results[place] = result
                if len(self._results) == len(self._items):
                    self._over.set()
            return self._is_open
