"""How many rows of batches run at once: fewer beside live requests, and as many of each tenant.
Pure."""

from collections import Counter


class RowShares:
    """Shares the rows that batches may use among their tenants. alone, beside_live: rows of all
    batches together. live: whether live requests run now.
    """

    def __init__(self, alone: int, beside_live: int) -> None:
        self.live = False
        self.alone = alone
        self._beside_live = beside_live
        self._batches = Counter[str]()
        self._rows = Counter[str]()

    @property
    def most(self) -> int:
        return self._beside_live if self.live else self.alone

    @property
    def running(self) -> int:
        return self._rows.total()

    def join(self, tenant: str) -> None:
        """Notes that one more batch of a tenant has lines to run."""
        self._batches[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._batches[tenant] -= 1
        self._batches += Counter()  # without zeros

    def has_room(self, tenant: str, rows: int) -> bool:
        """Whether so many more sequences of a tenant may begin. A line of more rows than may run at
        all runs alone."""
        most, running = self.most, self.running
        if not running:
            return most > 0
        if running + rows > most:
            return False
        mine = self._rows[tenant]
        return not mine or mine + rows <= -(-most // len(self._batches))

    def begin(self, tenant: str, rows: int) -> None:
        self._rows[tenant] += rows

    def end(self, tenant: str, rows: int) -> None:
        self._rows[tenant] -= rows
        self._rows += Counter()
