"""Usage of many tenants, read in parts."""

import time

import msgspec
import pytest

from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.tenancy import metering
from loraplex.router.tenancy.metering import Admission, Metering
from loraplex.router.tenancy.usage import UsageRecord, book_name


async def test_the_latest_requests_are_those_of_all_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many tenants there are, few records are held at once."""
    monkeypatch.setattr(metering, "_RECORDS_AT_ONCE", 4)
    store = MemoryStore(time.time)
    for at in range(30):
        tenant = f"t{at % 7}"
        record = UsageRecord(float(at), f"r{at}", tenant, "", "", None, "ok", 1, 0, 1, 0.5)
        await store.append(f"requests:{tenant}", [msgspec.json.encode(record)], 10)
    read = Metering(store, Admission(store, lambda: True, "open", "router"))
    found = await read.latest([f"t{number}" for number in range(7)], 3)
    assert [record.request_id for record in found] == ["r29", "r28", "r27"]


async def test_days_of_all_tenants_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "_BOOKS_AT_ONCE", 5)
    store = MemoryStore(time.time)
    tenants = [f"t{number}" for number in range(7)]
    for day in (3, 4):
        for number, tenant in enumerate(tenants):
            counters = {"k|a|requests": number + day}
            await store.count(book_name(tenant, day), counters, {"k|a|requests": ""}, 60.0)
    read = Metering(store, Admission(store, lambda: True, "open", "router"))
    found = await read.usage(tenants, 3, 5)
    assert [(row.tenant, row.requests) for row in found] == [
        (tenant, 2 * number + 7) for number, tenant in enumerate(tenants)
    ]
