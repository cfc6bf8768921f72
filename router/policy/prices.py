"""Prices of requests: a table, and sums of money. Pure."""

from fnmatch import fnmatchcase
from typing import Annotated

import msgspec
from msgspec import Meta

_MILLION = 1e6

Amount = Annotated[float, Meta(ge=0, le=1e9)]
Pattern = Annotated[str, Meta(max_length=200)]


class Spent(msgspec.Struct, frozen=True):
    """Tokens and time that a request used. cached_tokens: those of the prompt that were there
    already. device_s, copy_s: see `DeviceCost`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    device_s: float = 0.0
    copy_s: float = 0.0


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of one row. device_second: of steps; copy_second: of copies of adapters.
    million_cached_tokens: null = as others of the prompt.

    tenant, adapter, base: patterns (`*`, `?`, `[…]`) of whose requests they are. An adapter "" is
    the base alone. A base has a name where there are several.
    """

    tenant: Pattern = "*"
    adapter: Pattern = "*"
    base: Pattern = "*"
    device_second: Amount = 0.0
    copy_second: Amount = 0.0
    million_prompt_tokens: Amount = 0.0
    million_cached_tokens: Amount | None = None
    million_completion_tokens: Amount = 0.0

    def cost(self, spent: Spent) -> float:
        cached = self.million_cached_tokens
        if cached is None:
            cached = self.million_prompt_tokens
        tokens = (
            (spent.prompt_tokens - spent.cached_tokens) * self.million_prompt_tokens
            + spent.cached_tokens * cached
            + spent.completion_tokens * self.million_completion_tokens
        )
        devices = spent.device_s * self.device_second + spent.copy_s * self.copy_second
        return tokens / _MILLION + devices


FREE = Price()


class PriceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices, of which the first that fits a request holds. currency: of all."""

    currency: Annotated[str, Meta(min_length=1, max_length=16)]
    prices: tuple[Price, ...]

    def price_of(self, tenant: str, adapter: str, base: str = "") -> Price:
        """Finds the price of a request; nothing costs anything that no row fits."""

        def fits(row: Price) -> bool:
            both = ((tenant, row.tenant), (adapter, row.adapter), (base, row.base))
            return all(fnmatchcase(name, pattern) for name, pattern in both)

        return next(filter(fits, self.prices), FREE)


class Receipt(msgspec.Struct, frozen=True):
    """Price and time of an answer, as far as is known at its end. cost: in the table's currency."""

    cost: float
    device_s: float
