"""What readers hold outlives the table."""

import msgspec

from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.replica import Replica
from loraplex.router.shared.store import Row, Table


def replica(store: MemoryStore) -> Replica[str]:
    return Replica(store, "t", bytes.decode)


class Lossy(MemoryStore):
    """Comes back empty on demand."""

    life = "memory"

    def lose(self) -> None:
        self._tables.clear()
        self.life += "+"

    async def read(self, table: str, since: str = "") -> Table:
        found = await super().read(table, since)
        version = found.version.replace("memory", self.life)
        return msgspec.structs.replace(found, version=version)


async def test_a_lost_table_is_filled_by_whoever_comes_with_the_newest() -> None:
    store = Lossy(lambda: 0.0)
    one, two = replica(store), replica(store)
    await one.write("a", b"1")
    await one.write("b", b"1")
    await two.refresh()
    await one.write("a", None)
    await one.write("b", b"2")
    await one.refresh()
    store.lose()
    # This one has not heard of what was deleted and changed.
    await two.write("c", b"3")
    await two.refresh()
    await one.refresh()
    await two.refresh()
    for there in (one, two):
        assert dict(there.values) == {"b": "2", "c": "3"}
    assert (await store.read("t")).rows["a"] == Row(2, b"")


async def test_a_table_that_was_lost_before_it_was_read_is_filled_again() -> None:
    store = Lossy(lambda: 0.0)
    one = replica(store)
    await one.refresh()
    await one.write("a", b"1")
    store._tables.clear()
    await one.refresh()
    assert (await store.read("t")).rows == {"a": Row(1, b"1")}


async def test_a_table_that_is_lost_while_it_is_read_takes_nothing_along() -> None:
    class Losing(Lossy):
        loses = False

        async def read(self, table: str, since: str = "") -> Table:
            if self.loses:
                self.loses = False
                self._tables.clear()
            return await super().read(table, since)

    store = Losing(lambda: 0.0)
    one = replica(store)
    await one.write("a", b"1")
    await one.refresh()
    await store.put("t", "b", Row(1, b"2"))
    store.loses = True
    await one.refresh()
    assert dict(one.values) == {"a": "1"}
    await one.refresh()
    assert (await store.read("t")).rows == {"a": Row(1, b"1")}


async def test_what_is_written_while_the_table_is_read_stays() -> None:
    class Slow(MemoryStore):
        async def read(self, table: str, since: str = "") -> Table:
            found = await super().read(table, since)
            await one.write("a", b"new")
            return found

    store = Slow(lambda: 0.0)
    fast = MemoryStore(lambda: 0.0)
    store._tables = fast._tables
    one = replica(fast)
    await one.refresh()
    one._store = store
    await fast.put("t", "b", Row(1, b"other"))
    store.version = fast.version  # type: ignore[method-assign]
    store.put = fast.put  # type: ignore[method-assign]
    await one.refresh()
    assert dict(one.values) == {"a": "new", "b": "other"}


async def test_unchanged_rows_keep_their_values_identity() -> None:
    store = MemoryStore(lambda: 0.0)
    one = Replica(store, "t", lambda value: [value])
    await store.put("t", "a", Row(1, b"1"))
    await one.refresh()
    first = one.values["a"]
    await store.put("t", "b", Row(1, b"2"))
    await one.refresh()
    assert one.values["a"] is first
    assert one.values["b"] == [b"2"]
