"""Pages and snapshots of states below the device, together. Pure."""

from itertools import chain

from loraplex.server.engine.executor import PageCopies, PagesCopied
from loraplex.server.engine.swapping.swaps import PageSwaps


class AllSwaps:
    """Passes on what concerns both. A sequence waits for pages or for a snapshot, one at a time."""

    def __init__(self, *swaps: PageSwaps) -> None:
        self._swaps = [each for each in swaps if each]

    @property
    def is_copying(self) -> bool:
        return any(each.is_copying for each in self._swaps)

    @property
    def next_look(self) -> float | None:
        """As of `PageSwaps.next_look`."""
        looks = (each.next_look for each in self._swaps)
        return min((look for look in looks if look is not None), default=None)

    def go_on(self, now: float) -> None:
        """Begin the copies that there is reason and room for."""
        for each in self._swaps:
            each.go_on(now)

    def take_copies(self) -> list[PageCopies]:
        """Copies that begin now, in this order."""
        return [*chain.from_iterable(each.take_copies() for each in self._swaps)]

    def over(self, news: PagesCopied, now: float) -> None:
        """Note the end of copies."""
        next(each for each in self._swaps if each.has_begun(news.number)).over(news, now)

    def take_recalled(self) -> list[int]:
        """Keys of sequences whose recalls are over, as of `PageSwaps.take_recalled`."""
        return [*chain.from_iterable(each.take_recalled() for each in self._swaps)]

    def abandon(self, key: int) -> None:
        """The sequence waits no more."""
        for each in self._swaps:
            each.abandon(key)
