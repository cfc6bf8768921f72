"""Pages below the device: what is saved, what comes back, and what is lost when copies fail."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loraplex.server.engine.executor import PagesCopied
from loraplex.server.engine.memory.pages import PageHash, PagePool
from loraplex.server.engine.messages import SwapStats
from loraplex.server.engine.swapping.swaps import PageStore, PageSwaps
from tests.server.engine.harness import Harness, answer, check_answer, limits, make_request
from tests.server.invariants import check_pool, check_swaps

SIZES: dict[str, Any] = {"num_pages": 60, "max_context": 200, "max_step_tokens": 64}
SIZES |= {"host_pages": 200, "vocab_size": 1000}


def made(**changes: Any) -> Harness:
    return Harness(limits(**{**SIZES, **changes}))


def text(kind: int, count: int = 150) -> list[int]:
    return [10 + (i * i + kind * 101 * (i + 1)) % 900 for i in range(count)]


def swaps(harness: Harness) -> SwapStats:
    return harness.scheduler.stats().swaps


def lose(harness: Harness, kinds: range) -> None:
    """Other prompts, until the device has no earlier page."""
    for kind in kinds:
        answer(harness, text(kind))


def test_what_the_device_overwrote_comes_back() -> None:
    harness = made()
    assert answer(harness, text(0)) == 0
    lose(harness, range(1, 4))
    assert answer(harness, text(0)) == 148
    assert swaps(harness).recalled > 10
    assert swaps(harness).copied["in"] == swaps(harness).recalled
    assert answer(harness, text(0), adapter="a") == 0, "a page is of an adapter, too"
    assert answer(harness, text(0), salt="other") == 0


def test_prompts_of_many_steps_push_nothing_out_that_is_not_saved() -> None:
    """A prompt takes all its pages at once, more than those of a step and of copies under way."""
    harness = made(page_size=16, num_pages=400, host_pages=2000, max_context=2500)
    for _ in range(2):
        found = [answer(harness, text(kind, 2400)) for kind in range(4)]
    assert found == [2384] * 4


def test_prompts_that_come_from_the_disk_push_nothing_out_that_is_not_there() -> None:
    """Pages that are read take room in host memory, as those that leave the device do."""
    harness = made(page_size=16, num_pages=200, host_pages=350, disk_pages=2000, max_context=2500)
    for _ in range(2):
        found = [answer(harness, text(kind, 1500)) for kind in range(9)]
    assert found == [1488] * 9
    assert swaps(harness).copied["read"] > 200


def test_without_host_memory_it_is_computed_again() -> None:
    harness = made(host_pages=0)
    answer(harness, text(0))
    lose(harness, range(1, 4))
    assert answer(harness, text(0)) == 0
    assert swaps(harness) == SwapStats()


def test_nothing_is_copied_while_the_device_has_room() -> None:
    harness = made(num_pages=400)
    for kind in range(3):
        answer(harness, text(kind))
    assert swaps(harness) == SwapStats()


@pytest.mark.parametrize("windows", [(None, 40), (70,), (None, 9, 9)])
def test_groups_of_layers_come_back_as_far_as_they_are_seen(
    windows: tuple[int | None, ...],
) -> None:
    harness = made(page_windows=windows, num_pages=80 * len(windows), host_pages=2000)
    answer(harness, text(0))
    for kind in range(1, 9):
        answer(harness, text(kind))
    assert answer(harness, text(0)) == 148
    assert swaps(harness).recalled


def test_an_activated_adapter_goes_on_from_the_bases_pages() -> None:
    harness = made()
    answer(harness, text(0))
    lose(harness, range(1, 4))
    assert answer(harness, [*text(0), 5, 6, 7], adapter="a", adapter_from=150) == 148


def test_two_that_want_the_same_pages_bring_them_once() -> None:
    harness = made(num_pages=90)
    answer(harness, text(0))
    lose(harness, range(1, 5))
    before = swaps(harness).recalled
    requests = [make_request([*text(0, 148), 7, 7 + i]) for i in range(2)]
    keys = [harness.submit(request) for request in requests]
    harness.run()
    for key, request in zip(keys, requests, strict=True):
        check_answer(harness, key, request)
    assert swaps(harness).recalled - before <= 37


def test_a_preempted_sequence_is_not_computed_again() -> None:
    """Two answers grow until the device has no page for both; the younger one is put aside."""
    harness = made(num_pages=50, max_rows=2)
    requests = [make_request(text(kind, 80), max_tokens=110) for kind in range(2)]
    keys = [harness.submit(request) for request in requests]
    harness.run()
    for key, request in zip(keys, requests, strict=True):
        check_answer(harness, key, request)
    stats = harness.scheduler.stats()
    assert stats.preemptions >= 1
    assert stats.swaps.recalled > 10
    starts = [piece for plan in harness.plans for piece in plan.slices if piece.kind == "prompt"]
    computed = sum(piece.num_new for piece in starts)
    assert computed <= 160 + 4 * 4 * stats.preemptions, "all but its last tokens came back"


def test_states_and_pages_come_back_together() -> None:
    harness = made(has_states=True, num_snapshots=30)
    answer(harness, text(0))
    lose(harness, range(1, 4))
    assert answer(harness, text(0)) == 148
    assert swaps(harness).recalled


def test_what_host_memory_gives_up_comes_from_the_disk() -> None:
    harness = made(host_pages=80, disk_pages=400)
    answer(harness, text(0))
    lose(harness, range(1, 9))
    assert answer(harness, text(0)) == 148
    assert swaps(harness).copied["read"] > 20
    assert swaps(harness).disk > 100


def test_pages_of_an_earlier_start_are_read() -> None:
    first = made(host_pages=80, disk_pages=400)
    lose(first, range(9))
    kept = list(first.scheduler.swaps.disk._kept)
    assert len(kept) > 100
    second = Harness(first.limits)
    second.executor.pages_below._files = dict(first.executor.pages_below._files)
    second.scheduler = type(second.scheduler)(first.limits, second.scheduler.config, kept)
    assert answer(second, text(0)) == 148


def test_bad_files_are_computed_again_and_a_full_disk_harms_nobody() -> None:
    harness = made(host_pages=80, disk_pages=400)
    lose(harness, range(9))
    harness.executor.pages_below.bad_percent = 100
    before = swaps(harness)
    assert answer(harness, text(0)) < 148
    assert swaps(harness).failed["read"]
    lose(harness, range(20, 24))
    assert swaps(harness).failed["write"] > before.failed.get("write", 0)
    assert swaps(harness).disk <= before.disk
    harness.executor.pages_below.bad_percent = 0
    assert answer(harness, text(23)) == 148


def test_a_failed_step_is_forgotten_everywhere() -> None:
    """Its prompt had come back from host memory: no tier gives it to anyone any more."""
    harness = made(host_pages=80, disk_pages=400)
    lose(harness, range(9))
    harness.submit(make_request(text(0), max_tokens=30))
    while not harness.scheduler._running:
        harness.finish_copies()
        harness.plan()
    (sequence,) = harness.scheduler._running
    keys = list(sequence.hashes)
    harness.tickets.clear()
    harness.executor.wait_idle()
    harness.scheduler.fail_running("internal", "lost")
    harness.exchange()
    below = harness.scheduler.swaps
    assert len(keys) > 20
    assert not any(map(below.knows, keys))
    assert not any(map(harness.scheduler.pages.pool.knows, keys))
    harness.run()
    assert not set(keys) & set(harness.executor.pages_below._files)
    assert answer(harness, text(0)) == 0


def test_running_sequences_go_before_those_that_wait_for_pages() -> None:
    harness = made(num_pages=46, max_rows=3)
    answer(harness, text(0))
    lose(harness, range(1, 4))
    grows = make_request(text(7, 20), max_tokens=100)
    first = harness.submit(grows)
    for _ in range(3):
        harness.cycle()
    harness.executor.pages_below.polls = 10_000
    parked = make_request(text(0))
    second = harness.submit(parked)
    harness.cycle()
    assert len(harness.scheduler.recalls) == 1
    harness.abort(second)
    assert len(harness.scheduler.recalls) == 0
    harness.executor.pages_below._moving = [
        (1, copies) for _, copies in harness.executor.pages_below._moving
    ]
    harness.executor.pages_below.polls = 1
    harness.run()
    check_answer(harness, first, grows)
    harness.assert_at_rest()


def test_what_is_forgotten_before_its_copy_begins_is_not_waited_for() -> None:
    sizes = limits(**SIZES)
    pool = PagePool(sizes.num_pages, sizes.page_size)
    below = PageSwaps(sizes, pool)
    for number, digest in enumerate((b"a", b"b", b"c")):
        taken = below.host.take()
        assert taken is not None
        below.host.keep(taken.slot, digest)
        below.recall(number, [digest], pool.allocate(1) or [], [])
        below.go_on(0.0)
    copies = below.take_copies()
    assert [each.way for each in copies] == ["in", "in"], "the third waits for one of them"
    below.forget([b"b", b"c"])
    below.over(PagesCopied(copies[0].number), 0.0)
    below.go_on(0.0)
    assert below.take_recalled() == [0, 2]
    below.over(PagesCopied(copies[1].number), 0.0)
    assert below.take_recalled() == [1]
    assert [pool.knows(digest) for digest in (b"a", b"b", b"c")] == [True, False, False]
    assert pool.available == sizes.num_pages
    check_pool(pool)
    check_swaps(below)


class Store(RuleBasedStateMachine):
    """Slots are never lost or shared, and whoever reads one finds what it was kept for."""

    @initialize(count=st.integers(0, 5))
    def begin(self, count: int) -> None:
        self.store = PageStore(count)
        self.taken: list[int] = []
        self.reading: list[tuple[int, PageHash]] = []
        self.content: dict[int, PageHash] = {}

    @rule()
    def take(self) -> None:
        taken = self.store.take()
        if taken is None:
            assert len({*self.taken, *(slot for slot, _ in self.reading)}) == self.store.count
            return
        assert taken.slot not in [slot for slot, _ in self.reading]
        assert taken.evicted == self.content.pop(taken.slot, None) or taken.evicted is None
        self.taken.append(taken.slot)

    @rule(name=st.sampled_from([b"a", b"b", b"c"]), keeps=st.booleans())
    def end(self, name: PageHash, keeps: bool) -> None:
        if not self.taken:
            return
        slot = self.taken.pop()
        if keeps:
            self.content.setdefault(slot, name) if not self.store.knows(name) else None
            self.store.keep(slot, name)
        else:
            self.store.give_back(slot)

    @rule(name=st.sampled_from([b"a", b"b", b"c"]), uses=st.booleans())
    def read(self, name: PageHash, uses: bool) -> None:
        if self.store.knows(name):
            slot = self.store.use(name) if uses else self.store.hold(name)
            assert self.content[slot] == name
            self.reading.append((slot, name))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.reading:
            at = data.draw(st.integers(0, len(self.reading) - 1))
            self.store.let_go(self.reading.pop(at)[0])

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def forget(self, name: PageHash) -> None:
        known = self.store.knows(name)
        assert self.store.forget(name) == known
        assert not self.store.knows(name)
        self.content = {slot: of for slot, of in self.content.items() if of != name}

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "store"):
            store = self.store
            found = [*store._free, *store._kept.values(), *store._forgotten, *self.taken]
            assert sorted(found) == list(range(store.count))
            assert store.num_kept == len(store._kept) == len(self.content)


Store.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestStore = Store.TestCase
