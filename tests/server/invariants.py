"""Checks of the engine's pages and arena and of the worker's sequences, after any operation."""

from collections import Counter
from collections.abc import Iterable

from loraplex.server.engine.memory.pages import PagePool
from loraplex.server.engine.memory.residency import TAKEN, AdapterArena, each
from loraplex.server.engine.scheduling.states import SequenceStates
from loraplex.server.engine.swapping.swaps import PageSwaps
from loraplex.server.worker.sequences import Identity, SequenceTable


def check_pool(pool: PagePool) -> None:
    """Raises AssertionError: a page is not in exactly one of free, cached, held."""
    held = {p for p, n in enumerate(pool._references) if n > 0}
    assert min(pool._references, default=0) >= 0, "negative references"
    idle, saving = set(pool._idle), pool._saving
    assert pool._busy == len(saving & idle), "pages that are copied are miscounted"
    groups = [*pool._free, *idle, *held, *(saving - idle - held)]
    assert sorted(groups) == list(range(pool.num_pages)), "pages lost or in two places"
    assert set(pool._idle) <= set(pool._hash_of), "a cached page without a hash"
    assert not set(pool._free) & set(pool._hash_of), "a free page with a hash"
    assert pool._page_of == {h: p for p, h in pool._hash_of.items()}, "hashes out of step"


def check_snapshots(states: SequenceStates, written: Iterable[int]) -> None:
    """Raises AssertionError: a snapshot is lost, or held by others than use it. written: by slices
    in flight."""
    pool, swaps = states.pool, states.swaps
    check_pool(pool.slots)
    check_swaps(swaps)
    coming = [move.page for way, of in swaps._batches.values() if way == "in" for move in of]
    recalled = [slot for recall in swaps._recalls.values() for slot in recall.held]
    left = [save.snapshot for save in states.saves]
    held = Counter([*written, *pool._of_plan, *left, *coming, *recalled])
    found = {slot: count for slot, count in enumerate(pool.slots._references) if count}
    assert held == found, "snapshots are held by others than use them"


def check_swaps(swaps: PageSwaps) -> None:
    """Raises AssertionError: a slot is not in exactly one of free, kept, forgotten, written."""
    moves = {
        way: [move for each, of in swaps._batches.values() if each == way for move in of]
        for way in ("out", "in", "write", "read")
    }
    written = {
        swaps.host: [move.slot for way in ("out", "read") for move in moves[way]],
        swaps.disk: [move.stored for move in moves["write"]],
    }
    for store, slots in written.items():
        found = [*store._free, *store._kept.values(), *store._forgotten, *slots]
        assert sorted(found) == list(range(store.count)), "slots lost or in two places"
        assert all(count > 0 for count in store._reads.values()), "readers are miscounted"
    held = [swaps._pool._references[move.page] for move in moves["in"]]
    assert all(held), "a page comes that nobody holds"
    saving = sorted(move.page for move in moves["out"])
    assert saving == sorted(swaps._pool._saving), "other pages are copied than are kept"
    reads = Counter(move.slot for move in [*moves["in"], *moves["write"], *swaps._queues["in"]])
    assert swaps.host._reads == reads, "slots are read by others than hold them"


def check_arena(arena: AdapterArena) -> None:
    """Raises AssertionError: extents or slots are lost or shared, or leases are wrong."""
    taken = [x for e in arena._entries.values() for x in e.extents]
    assert len(taken) == len(set(taken)), "two adapters share an extent"
    assert all(arena._map[x] == TAKEN for x in taken), "a used extent is marked free"
    assert len(taken) + arena.free_extents == arena.num_extents, "extents lost"
    assert arena.num_ready == len(arena.ready), "those that are ready are miscounted"
    for entry in arena._entries.values():
        rows = tuple(each(entry.spans))
        assert rows == tuple(sorted(entry.extents)), "spans tell of other extents"
    slots = [e.placement.adapter_slot for e in arena._entries.values()] + arena._free_slots
    assert sorted(slots) == list(range(arena.num_slots)), "adapter slots lost or shared"
    for digest, entry in arena._entries.items():
        assert entry.leases >= 0, f"negative leases of {digest}"
        assert entry.ready or entry.leases == 0, f"{digest} leased while loading"


def check_table(table: SequenceTable) -> None:
    """Raises AssertionError: the two views of the live sequences differ."""
    listed = {
        key: (connection, Identity(*name, choice))
        for connection, requests in table._choices.items()
        for name, choices in requests.items()
        for choice, key in choices.items()
    }
    owned = {
        key: (live.connection, live.identity)
        for key, live in table._live.items()
        if live.connection is not None
    }
    assert listed == owned, (listed, owned)
    assert table.orphans == len(table._live) - len(owned)
    assert len(table._live) <= table.capacity
