"""Virtual token counters: the party that was served least goes next. Pure.

After Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): the party that has used
least for its weight goes first. A party that was idle is lifted to where the others are, so nobody
saves up.
"""

import heapq
from collections import OrderedDict

# Idle parties of one order that are remembered, because they may still be ahead.
MAX_IDLE_ACCOUNTS = 1024


class Account:
    """The service that one party had, in priced tokens divided by its weight."""

    __slots__ = ("active", "arrival", "listed", "name", "virtual", "weight")

    def __init__(self, name: str, virtual: float) -> None:
        self.name = name
        self.virtual = virtual
        self.weight = 1.0
        self.active = False
        self.arrival = 0
        self.listed: _Entry | None = None

    def charge(self, cost: float) -> None:
        """Adds a cost to the party's service. It is not negative: that is `FairOrder.refund`."""
        self.virtual += cost / self.weight


# Ties go by arrival. An entry is valid while it is its account's `listed` one.
_Entry = tuple[float, int, int, Account]


class FairOrder:
    """Parties that wait, least served first; ties in order of arrival.

    Counters may change while their party waits: a charge is noticed when the party comes up, a
    refund at once.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._heap: list[_Entry] = []
        self._entries = 0
        self._arrivals = 0
        self._active = 0

    def __len__(self) -> int:
        """Parties that wait."""
        return self._active

    def join(self, name: str) -> Account:
        """Lets a party begin to wait. `leave` comes before the next call for it."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, self.clock)
        account.virtual = max(account.virtual, self.clock)
        account.active = True
        self._arrivals += 1
        account.arrival = self._arrivals
        self._active += 1
        self._list(account)
        return account

    def leave(self, account: Account) -> None:
        account.active = False
        account.listed = None
        self._active -= 1
        self._accounts.move_to_end(account.name)
        if len(self._accounts) - self._active > MAX_IDLE_ACCOUNTS:
            idle = next(name for name, other in self._accounts.items() if not other.active)
            del self._accounts[idle]

    def first(self, count: int) -> list[Account]:
        """Lists at most so many of those who wait, the next one first."""
        found: list[Account] = []
        if self._active == 1 and self._heap[0][3].active:  # nobody to compare with
            return [self._heap[0][3]]
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            account = entry[3]
            if account.listed is not entry:
                continue
            if account.virtual > entry[0]:
                self._list(account)
            else:
                found.append(account)
        for account in found:
            self._list(account)
        return found

    def served(self, account: Account, cost: float) -> None:
        """Charges a party that had its turn. The clock follows the least served who wait."""
        least = account if self._active == 1 else self.first(1)[0]
        self.clock = max(self.clock, least.virtual)
        account.charge(cost)

    def refund(self, account: Account, cost: float) -> None:
        """Takes back what was charged too early."""
        account.virtual -= cost / account.weight
        if account.listed is not None and account.virtual < account.listed[0]:
            self._list(account)

    def age(self, share: float) -> None:
        """Forgives those who wait this share of what they are ahead of the clock."""
        for account in [entry[3] for entry in self._heap if entry[3].listed is entry]:
            ahead = account.virtual - self.clock
            if ahead > 0:
                self.refund(account, ahead * share * account.weight)

    def _list(self, account: Account) -> None:
        self._entries += 1
        entry = (account.virtual, account.arrival, self._entries, account)
        account.listed = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * self._active:
            self._heap = [entry for entry in self._heap if entry[3].listed is entry]
            heapq.heapify(self._heap)
