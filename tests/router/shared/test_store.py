"""The contract of every store: one router's memory, Redis, and Redis as a cluster keeps keys."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from loraplex.router.names.served import OwnedName
from loraplex.router.policy.quota import UNIT, Ask, Limits, Subject
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.replica import Replica
from loraplex.router.shared.store import MAX_COUNTERS, Row, Settlement, Store
from tests.router.serving import poll
from tests.router.shared.stores import redis_store


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(time.time)
        return
    options = ("--cluster-enabled", "yes") if request.param == "cluster" else ()
    async with redis_store(*options) as store:
        yield store


async def until_gone(store: Store, key: str) -> None:
    async def gone() -> bool:
        return await store.get(key) is None

    await poll(gone)


async def test_values_are_set_and_end(store: Store) -> None:
    assert await store.get("a") is None
    await store.set("a", b"1", 60)
    await store.set("b", b"2", 0.02)
    await until_gone(store, "b")
    assert await store.get("a") == b"1"
    await store.set("a", b"3", 0.02)
    await until_gone(store, "a")


async def test_one_of_many_adds_a_value(store: Store) -> None:
    answers = await asyncio.gather(*(store.add("a", b"%d" % i, 60) for i in range(8)))
    there = await store.get("a")
    assert answers.count(None) == 1
    assert {answer for answer in answers if answer is not None} == {there}
    assert answers.index(None) == int(there or b"-1")


async def test_a_value_is_swapped_for_what_it_was(store: Store) -> None:
    assert not await store.swap("a", b"1", b"2", 60)
    await store.set("a", b"1", 60)
    assert not await store.swap("a", b"0", b"2", 60)
    assert await store.swap("a", b"1", b"2", 60)
    assert await store.get("a") == b"2"
    assert await store.swap("a", b"2", None, 60)
    assert await store.get("a") is None


async def test_the_newest_revision_of_a_row_wins(store: Store) -> None:
    assert (await store.read("keys")).version == ""
    assert await store.put("keys", "a", Row(1, b"one:\x00"))
    first = await store.read("keys")
    assert first.rows == {"a": Row(1, b"one:\x00")}
    assert not await store.put("keys", "a", Row(1, b"other"))
    assert await store.version("keys") == first.version
    assert await store.put("keys", "a", Row(3, b"three"))
    assert not await store.put("keys", "a", Row(2, b"two"))
    assert await store.put("keys", "b", Row(1, b""))
    second = await store.read("keys")
    assert second.rows == {"a": Row(3, b"three"), "b": Row(1, b"")}
    assert second.version not in ("", first.version)
    assert (await store.read("others")).rows == {}


async def test_leases_end_unless_they_are_renewed(store: Store) -> None:
    await store.lease("workers", "w1", b"one", 60)
    await store.lease("workers", "w2", b"two", 0.02)
    await store.lease("workers", "w3", b"three", 60)
    await store.unlease("workers", "w3")

    async def over() -> bool:
        return "w2" not in await store.leased("workers")

    await poll(over)
    assert await store.leased("workers") == {"w1": b"one"}
    await store.lease("workers", "w1", b"again", 60)
    assert await store.leased("workers") == {"w1": b"again"}


async def test_a_log_keeps_the_newest(store: Store) -> None:
    await store.append("audit", [], 3)
    assert await store.tails(["audit"], 10) == [[]]
    await store.append("audit", [b"1", b"2"], 3)
    await store.append("audit", [b"3", b"4"], 3)
    assert await store.tails(["audit"], 10) == [[b"4", b"3", b"2"]]
    logs = [*(f"empty {i}" for i in range(3000)), "audit"]
    assert await store.tails(logs, 1) == [*[[]] * 3000, [b"4"]]


async def test_counters_add_up_in_a_bounded_book(store: Store) -> None:
    groups = {"a": "rest", "b": "rest"}
    await store.count("day", {"a": 2, "b": 1}, groups, 60)
    await store.count("day", {"a": 3}, groups, 60)
    assert await store.counts(["day"]) == [{"a": 5, "b": 1}]
    many = {f"c{i}": 1 for i in range(MAX_COUNTERS)}
    await store.count("day", many, dict.fromkeys(many, "rest"), 60)
    (counters,) = await store.counts(["day"])
    assert len(counters) == MAX_COUNTERS + 1
    assert counters["rest"] == 2
    assert sum(counters.values()) == 6 + MAX_COUNTERS
    names = [f"day {i}" for i in range(1100)]
    for i in (0, 7, 1099):
        await store.count(names[i], {"a": i + 1}, groups, 60)
    found = await store.counts([*names, "day", "day 7"])
    assert found == [
        *({"a": i + 1} if i in (0, 7, 1099) else {} for i in range(1100)),
        counters,
        {"a": 8},
    ]
    assert await store.counts([]) == []


def ask(lease: str, tokens: int = 10, **limits: int) -> Ask:
    tenant = Subject("tenant:acme", Limits(requests_per_minute=100))
    return Ask("acme", (Subject("key:k1", Limits(**limits)), tenant), lease, tokens)


async def test_what_is_reserved_and_not_used_comes_back_once(store: Store) -> None:
    one = ask("r1", 60, tokens_per_minute=100, budget_tokens=1000)
    verdict = await store.admit(one)
    assert verdict.reason is None
    refused = await store.admit(ask("r2", 60, tokens_per_minute=100, budget_tokens=1000))
    assert (refused.reason, refused.subject) == ("tokens", 0)
    assert 0 < refused.retry_ms <= 12_000
    for _ in range(2):
        await store.settle(Settlement(one, verdict, 5))
    again = await store.admit(ask("r3", 60, tokens_per_minute=100, budget_tokens=1000))
    assert again.reason is None
    standing = again.standings[0]
    assert standing.used == 65
    assert 35 * UNIT <= standing.tokens < 60 * UNIT


async def test_a_place_is_held_until_settled_or_its_time_is_over(store: Store) -> None:
    first = ask("r1", concurrency=1)
    verdict = await store.admit(first)
    assert (await store.admit(ask("r2", concurrency=1))).reason == "concurrency"
    await store.settle(Settlement(first, verdict, 0))
    short = Ask("acme", first.subjects, "r3", 10, lease_ms=20)
    assert (await store.admit(short)).reason is None

    async def admitted() -> bool:
        return (await store.admit(ask("r4", concurrency=1))).reason is None

    await poll(admitted)
    assert (await store.admit(ask("r5", concurrency=1))).reason == "concurrency"


async def test_a_place_that_is_renewed_stays(store: Store) -> None:
    held = Ask("acme", ask("r1", concurrency=1).subjects, "r1", 10, lease_ms=60_000)
    await store.admit(held)
    await store.renew([held, ask("never-admitted", concurrency=1)])
    refused = await store.admit(ask("r2", concurrency=1))
    assert (refused.reason, refused.standings[0].running) == ("concurrency", 1)


async def test_what_one_subject_lacks_costs_the_others_nothing(store: Store) -> None:
    first = await store.admit(ask("r1", requests_per_minute=1))
    assert first.standings[1].requests == 99 * UNIT
    refused = await store.admit(ask("r2", requests_per_minute=1))
    assert (refused.reason, refused.subject) == ("requests", 0)
    assert refused.standings[1].requests < 100 * UNIT
    assert refused.standings[1].running == 1


async def test_what_was_written_since_a_version_is_read(store: Store) -> None:
    for number in range(5):
        assert await store.put("t", f"k{number}", Row(1, b"old"))
    first = await store.read("t")
    assert (first.is_whole, len(first.rows)) == (True, 5)
    nothing = await store.read("t", first.version)
    assert nothing.version == first.version
    assert nothing.is_whole or nothing.rows == {}
    await store.put("t", "k3", Row(2, b"new"))
    await store.put("t", "k9", Row(1, b""))
    await store.forget("t", ["k1"])
    later = await store.read("t", first.version)
    assert later.version != first.version
    assert {key: later.rows[key] for key in ("k3", "k9")} == {
        "k3": Row(2, b"new"),
        "k9": Row(1, b""),
    }
    assert later.is_whole or later.rows.keys() == {"k3", "k9"}
    another_life = await store.read("t", "another:5")
    assert another_life.is_whole
    assert another_life.rows.keys() == {"k0", "k2", "k3", "k4", "k9"}


async def test_equal_names_of_two_owners_are_rows_of_their_own(store: Store) -> None:
    names = [str(OwnedName("sql", tenant)) for tenant in ("", "acme", "globex")]
    for number, name in enumerate(names):
        assert await store.put("adapters", name, Row(1, b"%d" % number))
    first = await store.read("adapters")
    assert first.rows == {name: Row(1, b"%d" % n) for n, name in enumerate(names)}
    assert await store.put("adapters", names[1], Row(2, b"new"))
    assert not await store.put("adapters", names[2], Row(1, b"late"))
    changed = (await store.read("adapters", first.version)).rows
    assert changed[names[1]] == Row(2, b"new")
    await store.forget("adapters", names[:1])
    left = await store.read("adapters")
    assert left.rows == {names[1]: Row(2, b"new"), names[2]: Row(1, b"2")}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("judged:a:b:12", "judged:12"),
        ("idempotency::12", "idempotency:12"),
        ("batches:12", "batches:12"),
        ("alone", "alone"),
    ],
)
async def test_values_of_routers_that_know_no_owners_are_found(key: str, name: str) -> None:
    async with redis_store() as store:
        await store.link.client.set(f"test:value:{name}", b"1")
        assert await store.get(key) == b"1"


async def test_rows_of_a_router_that_keeps_no_order_are_read() -> None:
    async with redis_store() as store:
        await store.put("t", "a", Row(1, b"1"))
        first = await store.read("t")
        rows, version, _ = store._table("t")
        await store.link.client.hset(rows, "b", "1:2")
        await store.link.client.hincrby(version, "writes", 1)
        await store.put("t", "c", Row(1, b"3"))
        later = await store.read("t", first.version)
        assert later.is_whole
        assert later.rows.keys() == {"a", "b", "c"}


async def test_a_table_that_is_emptied_while_it_is_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with redis_store() as store:
        scan, seen = store._scan, list[str]()

        async def emptied(rows: str, cursor: int) -> tuple[int, dict[bytes, bytes]]:
            if not seen:
                await store.link.client.flushall()
            seen.append(rows)
            return await scan(rows, cursor)

        reader = Replica(store, "t", bytes.decode)
        await reader.write("a", b"1")
        await store.put("t", "b", Row(1, b"2"))
        monkeypatch.setattr(store, "_scan", emptied)
        await reader.refresh()
        await reader.refresh()
        assert (await store.read("t")).rows["a"] == Row(1, b"1")
        assert reader.values["a"] == "1"


async def test_rows_that_no_router_wrote_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with redis_store() as store:
        await store.put("t", "a", Row(1, b"1"))
        rows, version, order = store._table("t")
        client = store.link.client
        first = await store.read("t")
        await client.hset(rows, mapping={"b": "garbage", b"\xff": "1:2"})
        await client.zadd(order, {b"b": 2, b"\xff": 2})
        await client.hset(version, mapping={"writes": 2, "ordered": 2})
        for since in ("", first.version):
            assert set((await store.read("t", since)).rows) <= {"a"}
        assert "a row of t cannot be read" in caplog.text
