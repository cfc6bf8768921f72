"""Usage of requests, added up by day, tenant, key and adapter. Pure."""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.adapters.common.newest import NewestKept

Outcome = Literal["ok", "cancelled", "failed", "refused"]

OTHER = "_other"
# Kept so long; a request for usage may name at most so many days.
MAX_DAYS = 92
MAX_PENDING = 1 << 15
_COUNTS = (
    *("requests", "unfinished", "refused"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
)
# Counters in millionths: seconds of devices, and money.
_FINE = ("device_us", "copy_us", "cost_u")
_UNIT = 1_000_000


class UsageRecord(msgspec.Struct, frozen=True):
    """One request. at: Unix seconds, of its end.

    adapter: its registered name, else as its caller named it; "" = the base. base: of several, the
    one that it was for. device_s, copy_s, cost: see UsageRow; up to the request's end.
    """

    at: float
    request_id: str
    tenant: str
    key: str
    adapter: str
    digest: str | None
    outcome: Outcome
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    base: str | UnsetType = UNSET
    device_s: float = 0.0
    copy_s: float = 0.0
    cost: float = 0.0


class UsageRow(msgspec.Struct, frozen=True):
    """The usage of a key with an adapter. base: see UsageRecord.

    requests: all that were admitted; unfinished: those of them that ended before their time.
    refused: those that ended before they were admitted, at once or after work on the way in.

    device_s: seconds of devices in steps. copy_s: of copies of adapters that its requests caused.
    cost: at the prices of the time, in the table's currency.
    """

    tenant: str
    key: str
    adapter: str
    requests: int = 0
    unfinished: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    base: str | UnsetType = UNSET
    device_s: float = 0.0
    copy_s: float = 0.0
    cost: float = 0.0


class Pending:
    """Usage that is not yet in the store. It is bounded: what is too much counts as `_other`."""

    def __init__(self) -> None:
        self._books: dict[tuple[str, int], dict[str, int]] = {}
        self._size = 0
        # What rounding left of each counter in millionths: many small costs make one.
        self._rests = NewestKept[tuple[str, ...], float](MAX_PENDING)

    def add(self, record: UsageRecord) -> None:
        refused = record.outcome == "refused"
        amounts = (
            *(0 if refused else 1, record.outcome in ("cancelled", "failed"), refused),
            *(record.prompt_tokens, record.cached_tokens, record.completion_tokens),
        )
        self._count(record, zip(_COUNTS, amounts, strict=True))
        self.add_spent(record)

    def add_spent(self, record: UsageRecord) -> None:
        """Adds seconds and money of a record alone, which became known after its request's end."""
        amounts = (record.device_s, record.copy_s, record.cost)
        self._count(
            record,
            [(what, self._whole(record, what, a)) for what, a in zip(_FINE, amounts, strict=True)],
        )

    def _whole(self, record: UsageRecord, what: str, amount: float) -> int:
        """An amount in whole millionths. What is left is added to the next of the same counter."""
        if not amount:
            return 0
        counter = (record.tenant, record.key, record.adapter, record.base or "", what)
        exact = amount * _UNIT + self._rests.pop(counter, 0.0)
        self._rests[counter] = exact - round(exact)
        return round(exact)

    def _count(self, record: UsageRecord, amounts: Iterable[tuple[str, int]]) -> None:
        book = self._books.setdefault((record.tenant, int(record.at // 86400)), {})
        base = f"|{record.base}" if record.base else ""
        for what, amount in amounts:
            counter = f"{record.key}|{record.adapter}|{what}{base}"
            if amount and counter not in book:
                if self._size >= MAX_PENDING:
                    counter = group_of(counter)
                self._size += counter not in book
            if amount:
                book[counter] = book.get(counter, 0) + amount

    def take(self) -> tuple[str, dict[str, int]] | None:
        """Takes a book's name and counters; `give_back` returns what was not written."""
        if not self._books:
            return None
        (tenant, day), counters = self._books.popitem()
        self._size -= len(counters)
        return book_name(tenant, day), counters

    def give_back(self, name: str, counters: Mapping[str, int]) -> None:
        day, tenant = day_and_tenant(name)
        book = self._books.setdefault((tenant, day), {})
        for counter, amount in counters.items():
            self._size += counter not in book
            book[counter] = book.get(counter, 0) + amount


def book_name(tenant: str, day: int) -> str:
    """The name of a tenant's book for a day. day: since 1970-01-01 UTC."""
    return f"usage:{day}:{tenant}"


def tenants_book(day: int) -> str:
    """The name of a day's book: a counter for each tenant that used something."""
    return f"tenants:{day}"


def day_and_tenant(name: str) -> tuple[int, str]:
    """The day and the tenant in a book's name."""
    day, _, tenant = name.removeprefix("usage:").partition(":")
    return int(day), tenant


def group_of(counter: str) -> str:
    key, _, rest = counter.split("|", 2)
    return f"{key}|{OTHER}|{rest}"


def rows_of(tenant: str, books: Iterable[Mapping[str, int]]) -> list[UsageRow]:
    """Sums usage by key and adapter, over all of these days."""
    found: dict[tuple[str, str, str], dict[str, int]] = {}
    for book in books:
        for counter, amount in book.items():
            key, adapter, what, *base = counter.split("|", 3)
            place = (key, adapter, "".join(base))
            counts = found.setdefault(place, dict.fromkeys((*_COUNTS, *_FINE), 0))
            if what in counts:
                counts[what] += amount
    return [_row(tenant, place, counts) for place, counts in sorted(found.items())]


def _row(tenant: str, place: tuple[str, str, str], counts: Mapping[str, int]) -> UsageRow:
    key, adapter, base = place
    whole = {what: counts[what] for what in _COUNTS}
    fine = {what: counts[what] / _UNIT for what in _FINE}
    return UsageRow(
        tenant,
        key,
        adapter,
        **whole,
        base=base or UNSET,
        device_s=fine["device_us"],
        copy_s=fine["copy_us"],
        cost=fine["cost_u"],
    )
