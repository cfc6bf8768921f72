"""In which order the lines of a batch are sent, so that few adapters are loaded. Pure."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Groups of lines that name no adapter: nobody is asked about them.
BLANK, BAD, TWICE = -1, -2, -3


def send_order(groups: Sequence[int], answered: Sequence[int]) -> npt.NDArray[np.int64]:
    """Places of the lines that have no answer yet: an adapter's lines follow each other, and keep
    their order. Lines that nobody is asked about come first.

    groups: of each line its adapter's number, or BAD, TWICE, BLANK. answered: 1 = it has an answer.
    """
    of_line = np.asarray(groups, dtype=np.int32)
    is_open = (np.asarray(answered, dtype=np.uint8) == 0) & (of_line != BLANK)
    places = np.flatnonzero(is_open)
    return places[np.argsort(of_line[places], kind="stable")]


class AdapterWindow:
    """The adapters that have lines in flight: at most so many at once, so that they stay loaded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_flight: dict[int, int] = {}

    def has_room(self, group: int) -> bool:
        return group in self._in_flight or len(self._in_flight) < self._most

    def begin(self, group: int) -> None:
        self._in_flight[group] = self._in_flight.get(group, 0) + 1

    def end(self, group: int) -> None:
        self._in_flight[group] -= 1
        if not self._in_flight[group]:
            del self._in_flight[group]
