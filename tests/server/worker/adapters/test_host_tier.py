"""The host tier stages once, pins what the engine copies, and evicts the rest."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import SiteLayout, SlabLayout
from loraplex.adapters.slab.file import SlabFile, SlabSource
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.worker.adapters.ahead import KEPT_S
from loraplex.server.worker.adapters.host_tier import MAX_HINTS, HostTier, SlabGone, SlabUnavailable
from loraplex.server.worker.adapters.slab_saver import SlabSaver
from loraplex.server.worker.metrics import WorkerMetrics
from tests.server.invariants import check_arena
from tests.server.worker.slabs import EXTENT, UNFINISHED, Packing, write_slab_file
from tests.slab_files import read_layout

EXTENTS = 4


class Disk:
    """Slabs in a folder, with a gate to hold readers back.

    opened: digests that were asked for. held: digests whose file was open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[str] = []
        self.held: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def add(self, digest: str, extents: int = 1, sites: tuple[SiteLayout, ...] = ()) -> SlabLayout:
        path = self.folder / digest
        write_slab_file(path, digest, extents, sites)
        return read_layout(path)

    def open(self, digest: str) -> SlabFile:
        self.opened.append(digest)
        assert self.gate.wait(240)
        path = self.folder / digest
        if not path.exists():
            raise AdapterError("not_found", f"no {digest}")
        slab = SlabFile(path)
        self.held.append(digest)
        return slab


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(EXTENTS * EXTENT)


@pytest.fixture
def tier(disk: Disk, threads: ThreadPoolExecutor, memory: HostMemory) -> HostTier:
    """All loads take the same time, as its clock stands still."""
    arena = AdapterArena(EXTENTS, EXTENT, EXTENTS)
    return tier_of(memory, arena, disk, threads, lambda: 0.0)


def tier_of(
    memory: HostMemory,
    arena: AdapterArena,
    disk: Disk,
    threads: Executor,
    clock: Callable[[], float],
) -> HostTier:
    """Of slabs that are all on disk."""

    def save(*arguments: object) -> bool:
        raise AssertionError("it is there")

    metrics = WorkerMetrics()
    saver = SlabSaver(memory.view, save, threads, metrics)
    return HostTier(memory.view, arena, disk.open, threads, saver, metrics, clock)


async def test_bytes_lie_where_the_answer_says(
    tier: HostTier, disk: Disk, memory: HostMemory
) -> None:
    disk.add("a", 2)
    disk.add("b", 1)
    for digest in ("a", "b"):
        staged = await tier.acquire(digest)
        for run, first in zip(staged.layout.runs, staged.extents, strict=True):
            held = memory.view[first * EXTENT : (first + run) * EXTENT]
            assert np.all(np.frombuffer(held, np.uint8) == ord(digest))
    assert tier.used_bytes == 3 * EXTENT


async def test_callers_at_once_share_one_staging(tier: HostTier, disk: Disk) -> None:
    disk.add("a")
    disk.gate.clear()
    tier.prefetch("a")
    waiting = [asyncio.create_task(tier.acquire("a")) for _ in range(5)]
    disk.gate.set()
    staged = await asyncio.gather(*waiting)
    assert len({slab.extents for slab in staged}) == 1
    assert disk.opened == ["a"]


async def test_the_unpinned_go_first_the_pinned_never(tier: HostTier, disk: Disk) -> None:
    for digest in "abcde":
        disk.add(digest)
    staged = {digest: await tier.acquire(digest) for digest in "abcd"}
    waiting = asyncio.create_task(tier.acquire("e"))
    await asyncio.sleep(0)
    assert not waiting.done()
    tier.release("c")
    assert (await asyncio.wait_for(waiting, 240)).extents == staged["c"].extents
    assert disk.opened == list("abcde")


async def test_the_least_used_is_evicted(tier: HostTier, disk: Disk) -> None:
    for digest in "abcde":
        disk.add(digest)
        await tier.acquire(digest)
        tier.release(digest)
        await tier.acquire("a")
        tier.release("a")
    await tier.acquire("a")
    assert disk.opened == list("abcde")
    await tier.acquire("b")
    assert disk.opened == [*"abcde", "b"]


async def test_a_bad_slab_is_reported_and_leaves_room(tier: HostTier, disk: Disk) -> None:
    with pytest.raises(SlabGone, match="no a"):
        await tier.acquire("a")
    (disk.folder / "b").write_bytes(b"not a slab")
    with pytest.raises(SlabUnavailable, match="cannot be read"):
        await tier.acquire("b")
    disk.add("c", 2)
    whole = (disk.folder / "c").read_bytes()
    (disk.folder / "c").write_bytes(whole[:-EXTENT])
    with pytest.raises(SlabUnavailable, match="cannot be read"):
        await tier.acquire("c")
    assert tier.used_bytes == 0


class PackingDisk(Disk):
    """What is not there is packed anew."""

    def open(self, digest: str) -> SlabFile:
        if not (self.folder / digest).exists():
            self.add(digest)
        return super().open(digest)


async def test_a_slab_that_the_disk_garbled_is_packed_anew(
    tmp_path: Path, memory: HostMemory, threads: ThreadPoolExecutor
) -> None:
    disk = PackingDisk(tmp_path)
    disk.add("a")
    path = disk.folder / "a"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    tier = tier_of(memory, AdapterArena(EXTENTS, EXTENT, EXTENTS), disk, threads, lambda: 0.0)
    staged = await tier.acquire("a")
    (first,) = staged.extents
    held = memory.view[first * EXTENT : (first + 1) * EXTENT]
    assert np.all(np.frombuffer(held, np.uint8) == ord("a"))
    assert disk.opened == ["a", "a"]
    assert tier.used_bytes == EXTENT


async def test_a_slab_larger_than_the_memory_is_refused(tier: HostTier, disk: Disk) -> None:
    disk.add("a", EXTENTS + 1)
    with pytest.raises(SlabUnavailable, match="host_adapter_memory"):
        await tier.acquire("a")


async def test_a_lost_engine_unpins_all(tier: HostTier, disk: Disk) -> None:
    for digest in "abcde":
        disk.add(digest)
    for digest in "abcd":
        await tier.acquire(digest)
    tier.release_all()
    await asyncio.wait_for(tier.acquire("e"), 240)
    tier.release("a")
    tier.release("never staged")


async def test_a_lost_engine_leaves_nothing_half_finished(tier: HostTier, disk: Disk) -> None:
    disk.add("a", sites=(UNFINISHED,))
    disk.add("b", sites=(UNFINISHED,))
    disk.add("c", sites=(UNFINISHED,))
    disk.add("d")
    for digest in "abcd":
        await tier.acquire(digest)
    tier.finish("a")
    tier.release("b")  # the engine has left it alone
    tier.release_all()
    assert [tier.state(digest) for digest in "abcd"] == ["ready", "ready", "absent", "ready"]
    assert (await tier.acquire("a")).layout.is_finished
    assert not (await tier.acquire("c")).layout.is_finished
    assert disk.opened == list("abcdc")


async def test_a_failed_prefetch_is_silent_and_tried_again(tier: HostTier, disk: Disk) -> None:
    tier.prefetch("a")
    with pytest.raises(SlabUnavailable):
        await tier.acquire("a")
    disk.add("a")
    assert (await tier.acquire("a")).layout.digest == "a"


async def test_what_is_waited_for_is_not_evicted_before_it_is_taken(
    tier: HostTier, disk: Disk
) -> None:
    digests = "abcdefgh"  # twice what fits
    for digest in digests:
        disk.add(digest)

    async def copy(digest: str) -> None:
        await tier.acquire(digest)
        await asyncio.sleep(0)
        tier.release(digest)

    await asyncio.wait_for(asyncio.gather(*map(copy, digests)), 240)
    assert sorted(disk.opened) == list(digests)


async def test_evict_frees_what_nobody_reads_and_waits_for_what_comes(
    tier: HostTier, disk: Disk
) -> None:
    layout = disk.add("a")
    await tier.acquire("a")
    assert (tier.state("a"), tier.slab_bytes("a")) == ("ready", layout.nbytes)
    evicting = asyncio.create_task(tier.evict("a"))
    await turns(20)
    assert (evicting.done(), tier.state("a")) == (False, "ready"), "the engine reads it"
    tier.release("a")
    await asyncio.wait_for(evicting, 240)
    assert (tier.state("a"), tier.slab_bytes("a"), tier.used_bytes) == ("absent", 0, 0)
    await tier.evict("never here")
    disk.gate.clear()
    tier.prefetch("a")
    assert tier.state("a") == "loading"
    evicting = asyncio.create_task(tier.evict("a"))
    disk.gate.set()
    await asyncio.wait_for(evicting, 240)
    assert tier.state("a") == "absent"


async def until(condition: Callable[[], bool]) -> None:
    """Polls the real state, bounded in time."""
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")


async def staged_all(tier: HostTier, *digests: str) -> None:
    await until(lambda: all(tier.state(digest) == "ready" for digest in digests))


async def test_hints_are_staged_in_order_two_at_a_time(tier: HostTier, disk: Disk) -> None:
    for digest in "abcd":
        disk.add(digest)
    disk.gate.clear()
    tier.hint("abca")
    tier.hint("bd")
    assert [d for d in "abcd" if tier.state(d) == "loading"] == ["a", "b"]
    disk.gate.set()
    await staged_all(tier, *"abcd")
    tier.hint("abcd")
    assert sorted(disk.opened) == list("abcd")


async def test_a_request_does_not_wait_behind_hints(tier: HostTier, disk: Disk) -> None:
    for digest in "abc":
        disk.add(digest)
    disk.gate.clear()
    tier.hint("abc")
    waiting = asyncio.create_task(tier.acquire("c"))
    await asyncio.sleep(0)
    assert tier.state("c") == "loading"
    disk.gate.set()
    assert (await waiting).layout.digest == "c"
    await staged_all(tier, *"abc")
    assert disk.opened.count("c") == 1


async def test_hints_are_bounded_and_may_fail(tier: HostTier, disk: Disk) -> None:
    disk.gate.clear()
    tier.hint(f"absent {number}" for number in range(MAX_HINTS + 10))
    disk.add("a")
    waiting = asyncio.create_task(tier.acquire("a"))
    disk.gate.set()
    assert (await waiting).layout.digest == "a"
    last = f"absent {MAX_HINTS - 1}"
    await until(lambda: last in disk.opened and tier.state(last) == "absent")
    assert set(disk.opened) == {"a", *(f"absent {number}" for number in range(MAX_HINTS))}
    assert tier.used_bytes == EXTENT


async def test_what_comes_ahead_waits_for_no_room_and_keeps_no_place(
    tier: HostTier, disk: Disk
) -> None:
    for digest in "abcdef":
        disk.add(digest)
    for digest in "abcd":
        await tier.acquire(digest)
    tier.prefetch("e")
    tier.hint("f")
    assert (tier.state("e"), tier.state("f")) == ("loading", "loading")
    await until(lambda: tier.state("e") == tier.state("f") == "absent")
    waiting = asyncio.create_task(tier.acquire("e"))
    tier.release("a")
    assert (await asyncio.wait_for(waiting, 240)).layout.digest == "e"


async def test_what_comes_ahead_is_kept_until_it_is_taken(
    disk: Disk, threads: ThreadPoolExecutor, memory: HostMemory
) -> None:
    """Who waits for another comes first, all the same; and nobody may come for it."""
    now = 0.0
    arena = AdapterArena(EXTENTS, EXTENT, EXTENTS)
    tier = tier_of(memory, arena, disk, threads, lambda: now)
    for digest in "abcdefghi":
        disk.add(digest)
    await use(tier, *"abcd")
    tier.prefetch("e")
    tier.prefetch("f")
    await staged_all(tier, "e", "f")
    tier.prefetch("g")  # half of the memory is theirs already
    tier.hint("h")
    assert (tier.state("g"), tier.state("h")) == ("absent", "absent")
    await use(tier, *"ghi")
    assert (tier.state("e"), tier.state("f")) == ("ready", "ready")
    held = [digest for digest in "ghi" if tier.state(digest) == "ready"]
    for digest in held:
        await tier.acquire(digest)
    await asyncio.wait_for(use(tier, "a"), 240)
    assert [tier.state(digest) for digest in "ef"].count("ready") == 1
    for digest in held:
        tier.release(digest)
    now = KEPT_S + 1.0
    await use(tier, *"abcdghi" * 2)
    assert (tier.state("e"), tier.state("f")) == ("absent", "absent")


async def use(tier: HostTier, *digests: str) -> None:
    for digest in digests:
        await tier.acquire(digest)
        tier.release(digest)


async def test_the_pinned_stay_while_others_have_room(tier: HostTier, disk: Disk) -> None:
    for digest in "abcdefgh":
        disk.add(digest)
    tier.pin_only("a")
    await use(tier, *"abcdefgh", *"bcdefgh")
    assert tier.state("a") == "ready"
    assert disk.opened.count("a") == 1
    tier.pin_only("")
    await use(tier, *"bcdefgh")
    assert tier.state("a") == "absent"


async def test_pins_that_leave_no_room_do_not_stop_the_service(tier: HostTier, disk: Disk) -> None:
    for digest in "abcde":
        disk.add(digest)
    tier.pin_only("abcd")
    await use(tier, *"abcd")
    await asyncio.wait_for(use(tier, "e"), 240)
    assert tier.state("e") == "ready"
    assert [tier.state(d) for d in "abcd"].count("ready") == 3
    disk.add("huge", EXTENTS + 1)
    with pytest.raises(SlabUnavailable, match="host_adapter_memory"):
        await tier.acquire("huge")


async def test_evictions_are_counted_by_reason(tier: HostTier, disk: Disk) -> None:
    for digest in "abcde":
        disk.add(digest)
    await use(tier, *"abcde")
    await tier.evict("e")
    assert tier.evictions == {"bytes": 1, "order": 1}


async def test_the_time_of_a_load_is_reported_once(
    disk: Disk, threads: ThreadPoolExecutor, memory: HostMemory
) -> None:
    ticks = iter([9.0, 10.0, 10.5])  # when there was room, and around the reading
    arena = AdapterArena(EXTENTS, EXTENT, EXTENTS)
    tier = tier_of(memory, arena, disk, threads, lambda: next(ticks))
    disk.add("a")
    assert [(await tier.acquire("a")).load_s for _ in range(2)] == [0.5, 0.0]


class Inline(Executor):
    """Runs at once, so that every order of the loop's steps can be tried."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


async def test_a_slab_that_leaves_the_disk_once_it_is_open_is_staged(
    tier: HostTier, disk: Disk
) -> None:
    disk.add("a", EXTENTS)
    disk.add("b")
    await tier.acquire("a")
    waiting = asyncio.create_task(tier.acquire("b"))
    await until(lambda: "b" in disk.held)
    (disk.folder / "b").unlink()
    tier.release("a")
    assert (await asyncio.wait_for(waiting, 240)).layout.digest == "b"


@pytest.mark.timeout(300)  # a turn of the loop that does not end cannot be timed otherwise
async def test_a_slab_that_is_evicted_as_it_comes_is_staged_again(
    disk: Disk, memory: HostMemory
) -> None:
    for digest in "ab":
        disk.add(digest, EXTENTS)
    for before, after in itertools.product(range(2, 8), range(20)):
        arena = AdapterArena(EXTENTS, EXTENT, EXTENTS)
        tier = tier_of(memory, arena, disk, Inline(), time.monotonic)
        tier.prefetch("a")
        await turns(before)
        other = asyncio.create_task(use(tier, "b"))  # pushes it out when it is there
        await turns(after)
        assert (await tier.acquire("a")).layout.digest == "a"
        tier.release("a")
        await other
        check_arena(arena)


@pytest.mark.parametrize("there", [True, False])
async def test_an_eviction_ends_however_a_staging_does(
    disk: Disk, memory: HostMemory, there: bool
) -> None:
    if there:
        disk.add("a")
    for before in range(30):
        arena = AdapterArena(EXTENTS, EXTENT, EXTENTS)
        tier = tier_of(memory, arena, disk, Inline(), time.monotonic)
        tier.prefetch("a")
        await turns(before)
        await asyncio.wait_for(tier.evict("a"), 240)
        assert arena.stage("a") == "absent"


class Saving:
    """A store that keeps configured slabs; a gate holds it back."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, bytes]] = []
        self.finished: list[str] = []  # of them
        self.given_up: list[str] = []
        self.begun: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: AdapterError | None = None

    def save(
        self,
        layout: SlabLayout,
        arena: memoryview,
        first_extents: Sequence[int],
        stopped: Callable[[], bool],
    ) -> bool:
        self.begun.append(layout.digest)
        while not self.gate.wait(0.01):
            if stopped():
                self.given_up.append(layout.digest)
                return False
        if self.error is not None:
            raise self.error
        held = b"".join(bytes(arena[x * EXTENT : (x + 1) * EXTENT]) for x in first_extents)
        self.saved.append((layout.digest, held))
        if layout.is_finished:
            self.finished.append(layout.digest)
        return True


@pytest.fixture
def saving() -> Saving:
    return Saving()


@pytest.fixture
def packing_tier(
    disk: Disk, threads: ThreadPoolExecutor, memory: HostMemory, saving: Saving
) -> HostTier:
    """Nothing is on disk, but for what is saved."""
    metrics = WorkerMetrics()
    arena = AdapterArena(EXTENTS, EXTENT, EXTENTS)
    saver = SlabSaver(memory.view, saving.save, threads, metrics)

    def open_slab(digest: str) -> SlabSource:
        slab = disk.open(digest)
        return slab if digest in dict(saving.saved) else Packing(slab)

    return HostTier(memory.view, arena, open_slab, threads, saver, metrics, lambda: 0.0)


async def test_what_is_packed_is_used_at_once_and_saved_behind(
    packing_tier: HostTier, disk: Disk, saving: Saving
) -> None:
    saving.gate.clear()
    for digest in "abc":
        disk.add(digest)
        await packing_tier.acquire(digest)  # whatever is not saved yet
    saving.gate.set()
    await until(lambda: len(saving.saved) == 3)
    assert saving.saved == [(digest, digest.encode() * EXTENT) for digest in "abc"]
    for digest in "abc":
        packing_tier.release(digest)
    for digest in "abc":
        await packing_tier.evict(digest)
        await packing_tier.acquire(digest)
    assert saving.begun == list("abc"), "what is on disk is not saved again"


async def test_what_the_engine_finishes_is_saved_once_it_is_finished(
    packing_tier: HostTier, disk: Disk, saving: Saving, memory: HostMemory
) -> None:
    for digest, sites in (("a", (UNFINISHED,)), ("b", ())):
        disk.add(digest, sites=sites)
        staged = await packing_tier.acquire(digest)
        if digest == "a":
            (place,) = staged.extents
    await until(lambda: len(saving.saved) == 1)
    assert saving.saved[0][0] == "b"
    memory.view[place * EXTENT : (place + 1) * EXTENT] = b"A" * EXTENT
    packing_tier.finish("a")
    packing_tier.release("a")
    await until(lambda: len(saving.saved) == 2)
    assert saving.saved[1] == ("a", b"A" * EXTENT)
    assert saving.finished == ["a"]


async def test_nobody_waits_for_room_that_a_file_is_written_from(
    packing_tier: HostTier, disk: Disk, saving: Saving
) -> None:
    saving.gate.clear()
    disk.add("a", EXTENTS)
    disk.add("b", EXTENTS)
    await packing_tier.acquire("a")
    await until(lambda: saving.begun == ["a"])
    packing_tier.release("a")
    assert (await asyncio.wait_for(packing_tier.acquire("b"), 240)).layout.digest == "b"
    assert saving.given_up == ["a"]
    packing_tier.release("b")
    await until(lambda: saving.begun == ["a", "b"])
    await asyncio.wait_for(packing_tier.evict("b"), 240)
    assert (saving.given_up, saving.saved) == (["a", "b"], [])


async def test_what_has_left_is_not_saved(
    packing_tier: HostTier, disk: Disk, saving: Saving
) -> None:
    """Its place holds another by then."""
    saving.gate.clear()
    for digest in "ab":
        disk.add(digest)
        await packing_tier.acquire(digest)
        packing_tier.release(digest)
    await packing_tier.evict("b")
    disk.add("c", EXTENTS - 1)
    await packing_tier.acquire("c")
    saving.gate.set()
    await until(lambda: [digest for digest, _ in saving.saved] == ["a", "c"])


async def test_a_file_that_cannot_be_written_is_nobodys_loss(
    packing_tier: HostTier, disk: Disk, saving: Saving
) -> None:
    saving.error = AdapterError("unavailable", "the disk is full")
    for digest in "ab":
        disk.add(digest)
        await packing_tier.acquire(digest)
    await until(lambda: saving.begun == ["a", "b"])
    packing_tier.release("a")
    await packing_tier.evict("a")
    saving.error = None
    assert (await packing_tier.acquire("a")).layout.digest == "a"
    await until(lambda: [digest for digest, _ in saving.saved] == ["a"])


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
