"""Snapshots of states: what is saved, who reads it, and that no token or snapshot is lost."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from loraplex.server.engine.memory.pages import SnapshotPool
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.protocol import BACKGROUND_PRIORITY, GenerateRequest
from tests.certifying.certificates import CertifyOptions
from tests.server.engine.harness import Harness, answer, check_answer, limits, make_request
from tests.server.invariants import check_snapshots

STATES: dict[str, Any] = {"has_states": True, "num_snapshots": 8, "num_pages": 80}
STATES |= {"max_context": 400, "max_step_tokens": 64}


def made(**changes: Any) -> Harness:
    return Harness(limits(**{**STATES, **changes}))


def text(count: int, kind: int = 0) -> list[int]:
    return [10 + (i * i + kind * i) % 80 for i in range(count)]


def test_a_prompt_is_read_up_to_its_last_full_page() -> None:
    harness = made()
    assert answer(harness, text(70)) == 0
    assert answer(harness, text(70)) == 68
    assert answer(harness, text(68) + [9] * 30) == 68
    assert answer(harness, text(70), adapter="a") == 0, "a state is of an adapter, too"
    assert answer(harness, text(70), adapter="a") == 68
    assert answer(harness, text(70), salt="other") == 0
    saves = [save for plan in harness.plans for piece in plan.slices for save in piece.saves]
    assert len(saves) == 4, "what is known is not saved again"


def test_the_second_visitor_of_a_beginning_saves_it() -> None:
    harness = made()
    assert answer(harness, text(50) + [8] * 20) == 0
    assert answer(harness, text(50) + [9] * 20) == 0
    assert answer(harness, text(50) + [7] * 20) == 48
    assert answer(harness, text(50)[:30] + [7] * 20) == 0


def test_neighbours_save_what_they_share_and_others_wait_for_that() -> None:
    """Two compute the same beginning side by side. The third waits for the second's snapshot."""
    harness = made(max_rows=8)
    keys = [harness.submit(make_request(text(100) + [n] * 10)) for n in (5, 6, 7, 8)]
    harness.run()
    assert all(harness.last(key).finish == "length" for key in keys)
    assert harness.scheduler.stats().prefix_hit_tokens == 2 * 100


def test_choices_of_a_prompt_wait_for_the_first() -> None:
    harness = made(max_rows=8)
    for choice in range(4):
        harness.submit(make_request(text(90), choice=choice))
    harness.run()
    assert harness.scheduler.stats().prefix_hit_tokens == 3 * 88


def test_an_activated_adapter_reads_the_state_of_the_base() -> None:
    harness = made()
    assert answer(harness, text(75)) == 0
    assert answer(harness, [*text(75), 5, 6], adapter="a", adapter_from=75) == 72
    assert answer(harness, [*text(82, 1), 5], adapter="a", adapter_from=81) == 0
    assert answer(harness, [*text(82, 1), 9, 9, 9, 9]) == 80, "it was saved where the adapter acts"


def test_long_prompts_have_borders_on_their_way() -> None:
    harness = made(num_pages=3000, max_context=10_000, max_step_tokens=3000)
    answer(harness, text(9000))
    positions = [save.position for p in harness.plans for s in p.slices for save in s.saves]
    assert positions == [4096, 8192, 8996]
    assert answer(harness, text(4100) + [9] * 900) == 4096


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    """A row is taken for a live sequence; pages and state are there when it comes back."""
    harness = made(max_rows=1)
    batch = make_request(text(30), max_tokens=12, priority=BACKGROUND_PRIORITY)
    key = harness.submit(batch)
    for _ in range(7):
        harness.cycle()
    live = make_request(text(20, 3))
    other = harness.submit(live)
    harness.run()
    check_answer(harness, key, batch)
    check_answer(harness, other, live)
    assert harness.scheduler.stats().preemptions == 1
    computed = [p for plan in harness.plans for p in plan.slices if p.start > 30]
    assert len({p.start for p in computed}) == len(computed), "no token was computed twice"
    assert sum(len(plan.restores) for plan in harness.plans) == 1


def test_a_model_without_pages_reads_states_alone() -> None:
    harness = made(page_windows=())
    assert answer(harness, text(70)) == 0
    assert answer(harness, text(68) + [9] * 30) == 68
    assert answer(harness, text(70), adapter="a") == 0
    for count in range(4):
        harness.submit(make_request(text(90, 2) + [5] * count))
    harness.run()
    assert harness.scheduler.stats().prefix_hit_tokens == 68 + 3 * 88


def test_without_snapshots_nothing_is_shared() -> None:
    harness = made(num_snapshots=0)
    assert answer(harness, text(70)) == 0
    assert answer(harness, text(70)) == 0


def test_a_lost_step_leaves_no_snapshot() -> None:
    harness = made()
    answer(harness, text(70))
    harness.submit(make_request(text(200, 2)))
    harness.plan()
    harness.tickets.clear()
    harness.executor.wait_idle()
    harness.scheduler.fail_running("internal", "lost")
    harness.exchange()
    check_snapshots(harness.scheduler.states, ())
    assert answer(harness, text(70)) == 0


BELOW: dict[str, Any] = {"num_snapshots": 3, "host_pages": 400, "host_snapshots": 40}


def test_snapshots_that_the_device_overwrote_come_back() -> None:
    harness = made(**BELOW)
    assert answer(harness, text(100)) == 0
    for kind in range(1, 9):
        answer(harness, text(100, kind))
    assert answer(harness, text(100)) == 96
    stats = harness.scheduler.stats()
    assert stats.state_swaps.recalled == stats.state_swaps.copied["in"] == 1
    assert answer(harness, text(100), adapter="a") == 0, "a state is of an adapter, too"
    assert answer(harness, text(100), salt="other") == 0
    assert stats.swaps.recalled > 10


def test_an_activated_adapter_goes_on_from_the_bases_snapshot() -> None:
    harness = made(**BELOW)
    for kind in range(9):
        answer(harness, text(100, kind))
    assert answer(harness, [*text(100), 5, 6, 7], adapter="a", adapter_from=100) == 96
    assert harness.scheduler.stats().state_swaps.recalled


def test_snapshots_come_back_from_the_disk() -> None:
    sizes = {"host_snapshots": 3, "host_pages": 80, "disk_pages": 400, "disk_snapshots": 40}
    harness = made(**BELOW | sizes)
    for kind in range(9):
        answer(harness, text(100, kind))
    assert answer(harness, text(100)) == 96
    stats = harness.scheduler.stats().state_swaps
    assert stats.copied["read"] == stats.copied["in"] == 1
    assert stats.disk > 5
    harness.executor.states_below.bad_percent = 100
    assert answer(harness, text(100, 1)) < 96, "a bad file is computed again"
    assert harness.scheduler.stats().state_swaps.failed["read"] == 1


def test_files_of_snapshots_give_way_to_others() -> None:
    """A file that is removed makes room among those of snapshots, not of pages."""
    harness = made(**BELOW | {"page_windows": (), "host_snapshots": 1, "disk_snapshots": 2})
    for kind in range(6):
        answer(harness, text(100, kind))
    stats = harness.scheduler.stats().state_swaps
    assert stats.copied["write"] > stats.disk == 2


def test_states_without_pages_come_back() -> None:
    harness = made(**BELOW | {"page_windows": (), "host_pages": 0})
    for kind in range(8):
        answer(harness, text(100, kind))
    assert [answer(harness, text(100, kind)) for kind in range(8)] == [96] * 8


def test_what_is_forgotten_does_not_come_back() -> None:
    """The device is lost: neither its snapshots nor their copies are read again."""
    harness = made(**BELOW)
    for kind in range(6):
        answer(harness, text(100, kind))
    states = harness.scheduler.states
    lost, below = states.pool.known(), list(states.swaps.host._kept)
    harness.executor.wait_idle()
    harness.scheduler.fail_running("internal", "lost")
    harness.exchange()
    assert len(lost) == 3
    assert not any(states.pool.knows(each) or states.swaps.knows(each) for each in lost)
    assert {*below} - {*lost} == {*states.swaps.host._kept}


def test_a_row_that_leaves_is_saved_before_its_snapshot_is_copied() -> None:
    harness = made(**BELOW | {"num_snapshots": 2, "max_rows": 1})
    first = make_request(text(100), max_tokens=60, priority=BACKGROUND_PRIORITY)
    key = harness.submit(first)
    for _ in range(12):
        harness.cycle()
    for kind in range(1, 5):
        harness.submit(make_request(text(100, kind)))
    harness.run()
    check_answer(harness, key, first)
    assert harness.scheduler.stats().preemptions
    assert harness.scheduler.stats().state_swaps.recalled


def test_what_a_plan_restores_is_not_overwritten_by_it() -> None:
    pool = SnapshotPool(2)
    for slot, name in enumerate((b"a", b"b")):
        assert pool.take() == slot
        pool.keep(slot, name)
    assert pool.read(b"a") == 0
    assert (pool.take(), pool.take()) == (1, None)
    pool.begin_plan()
    assert pool.take() == 0
    assert not pool.knows(b"a")


WISHES = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda shared, own, count: [10] * shared + [own] * count,
            st.sampled_from([0, 9, 16, 22]),
            st.sampled_from([5, 6]),
            st.integers(1, 12),
        ),
        "max_tokens": st.integers(1, 12),
        "adapter": st.sampled_from([None, None, "a", "b"]),
        "adapter_from": st.sampled_from([0, 0, 8, 13]),
        "priority": st.sampled_from([0, BACKGROUND_PRIORITY]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
    }
)


class Snapshots(RuleBasedStateMachine):
    """Prompts that share beginnings, on few rows, pages and snapshots."""

    @initialize(
        snapshots=st.integers(1, 6),
        pages=st.integers(12, 30),
        rows=st.integers(1, 3),
        tokens=st.sampled_from([3, 8, 20]),
        windows=st.sampled_from([(None,), (None,), (None, 5), ()]),
        depth=st.integers(1, 2),
        below=st.sampled_from([(0, 0), (100, 0), (100, 3), (100, 20), (0, 9)]),
    )
    def begin(
        self,
        below: tuple[int, int],
        snapshots: int,
        pages: int,
        rows: int,
        tokens: int,
        windows: tuple[int | None, ...],
        depth: int,
    ) -> None:
        sizes: dict[str, Any] = {"max_decodes": 12}
        sizes |= {"num_pages": pages * len(windows), "max_rows": rows, "max_step_tokens": tokens}
        sizes |= {"host_pages": below[0] if windows else 0, "host_snapshots": below[1]}
        engine = limits(
            has_states=True, num_snapshots=snapshots, page_windows=windows, max_context=48, **sizes
        )
        options = CertifyOptions(engine.vocab_size, engine.eos_token_ids)
        config = SchedulerConfig(max_waiting=12, max_draft=3)
        self.harness = Harness(engine, depth, config, options, right_percent=60)
        self.asked: dict[int, GenerateRequest] = {}
        self.aborted = set[int]()

    @rule(wish=WISHES)
    def submit(self, wish: dict[str, Any]) -> None:
        begins = min(wish["adapter_from"], len(wish["prompt"]) - 1)
        request = make_request(**{**wish, "adapter_from": begins})
        self.asked[self.harness.submit(request)] = request

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.asked:
            key = data.draw(st.sampled_from(sorted(self.asked)))
            self.harness.abort(key)
            self.aborted.add(key)

    @rule(times=st.integers(1, 8))
    def cycles(self, times: int) -> None:
        for _ in range(times):
            self.harness.cycle()

    @invariant()
    def is_bounded(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.assert_at_rest()
        for key, request in self.asked.items():
            if key not in self.aborted and self.harness.last(key).error != "overloaded":
                check_answer(self.harness, key, request)


Snapshots.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSnapshots = Snapshots.TestCase


@pytest.mark.exhaustive
def test_many_loads() -> None:
    run_state_machine_as_test(
        Snapshots, settings=settings(max_examples=500, stateful_step_count=60)
    )
