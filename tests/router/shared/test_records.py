"""What a log holds that is no record."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.records import readable
from loraplex.router.tenancy.audit import Audit
from loraplex.router.tenancy.records import AuditRecord

DEED = AuditRecord(1.0, "POST /v1/adapters", "sql", "acme", 200, "127.0.0.1", "r1")


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(msgspec.json.encode(DEED)))))
def test_records_are_read_whatever_lies_between_them(entries: list[bytes]) -> None:
    assert readable(entries, AuditRecord) == [DEED] * entries.count(msgspec.json.encode(DEED))


async def test_the_newest_deeds_are_reported_without_it(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(time.monotonic)
    audit = Audit(store)
    audit.record(DEED)
    await audit.flush()
    await store.append("audit", [b"\xff{", b'{"at": "noon"}'], 10)
    assert await audit.newest(10) == [DEED]
    assert sum("cannot be read" in line.message for line in caplog.records) == 2
