"""What readers hold outlives the table."""

from router.shared.memory_store import MemoryStore
from router.shared.replica import Replica
from router.shared.store import Row


def replica(store: MemoryStore) -> Replica[str]:
    return Replica(store, "t", bytes.decode)


class Lossy(MemoryStore):
    """Comes back empty when told to."""

    life = "memory"

    def lose(self) -> None:
        self._tables.clear()
        self.life += "+"

    async def version(self, table: str) -> str:
        return (await super().version(table)).replace("memory", self.life)


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
