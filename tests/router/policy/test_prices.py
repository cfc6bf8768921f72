"""Costs of requests by a table of prices."""

from pathlib import Path

import pytest

from loraplex.router.policy.prices import FREE, Price, PriceTable, Spent
from loraplex.router.tenancy.price_file import PricesError, read_prices

SPENT = Spent(
    prompt_tokens=3_000, cached_tokens=1_000, completion_tokens=500, device_s=2.0, copy_s=0.5
)


@pytest.mark.parametrize(
    ("price", "cost"),
    [
        (FREE, 0.0),
        (Price(device_second=0.25), 0.5),
        (Price(copy_second=1.0, device_second=0.25), 1.0),
        (Price(million_prompt_tokens=2.0), 0.006),
        (Price(million_prompt_tokens=2.0, million_cached_tokens=0.0), 0.004),
        (Price(million_completion_tokens=8.0), 0.004),
    ],
)
def test_costs(price: Price, cost: float) -> None:
    assert price.cost(SPENT) == pytest.approx(cost)


def test_the_first_row_that_fits_holds() -> None:
    acme, sql, rest = (
        Price(tenant="acme", device_second=1.0),
        Price(adapter="sql-*", device_second=2.0),
        Price(adapter="", device_second=3.0),
    )
    table = PriceTable("EUR", (acme, sql, rest))
    assert table.price_of("acme", "sql-1") is acme
    assert table.price_of("other", "sql-1") is sql
    assert table.price_of("other", "") is rest
    assert table.price_of("other", "json") is FREE
    small = Price(base="small", device_second=4.0)
    assert PriceTable("EUR", (small,)).price_of("", "json", "small") is small
    assert PriceTable("EUR", (small,)).price_of("", "json", "large") is FREE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("currency: EUR\nprices: [{device_second: 1, copy: 2}]", "copy"),
        ("currency: EUR\nprices: [{device_second: -1}]", "device_second"),
        ("prices: []", "currency"),
        ("]", "expected"),
        (None, "it cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "prices.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(PricesError, match=words):
        read_prices(file)
    file.write_text('{"currency": "EUR", "prices": [{"device_second": 0.001}]}')
    assert read_prices(file).price_of("", "x").device_second == 0.001
