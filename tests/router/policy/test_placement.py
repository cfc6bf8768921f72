"""Which worker gets a sequence, and why."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.policy.placement.placement import (
    Decision,
    PlacementRequest,
    Placer,
    WorkerView,
    rank,
)
from loraplex.router.policy.placement.prefixes import prefix_keys

DIGEST = "d"
REQUEST = PlacementRequest(DIGEST, "key", nbytes=50_000_000)


def view(worker_id: str = "w", **fields: object) -> WorkerView:
    base = WorkerView(worker_id, ready=True, credits=4)
    return msgspec.structs.replace(base, **({"own": {}, "coming": {}} | fields))


def fleet(count: int, **fields: object) -> list[WorkerView]:
    """The first is the adapter's first home, and so on."""
    ranking = rank(REQUEST.home_key, [f"w{i}" for i in range(count)])
    return [view(name, **fields) for name in sorted(ranking, key=lambda name: ranking[name])]


def choose(
    workers: list[WorkerView], request: PlacementRequest = REQUEST, *, held_s: float = 0.0
) -> tuple[WorkerView, str] | None:
    decision = ask(Placer(), workers, request, held_s=held_s)
    return None if decision is None else (decision.worker, decision.reason)


def ask(
    placement: Placer,
    workers: list[WorkerView],
    request: PlacementRequest = REQUEST,
    now: float = 0.0,
    held_s: float = 0.0,
) -> Decision | None:
    with_room = [worker for worker in workers if worker.has_room]
    return placement.choose(request, workers, with_room, now, held_s) if with_room else None


def test_the_base_goes_to_the_least_used() -> None:
    small, large = view("small", in_flight=2, credits=4), view("large", in_flight=3, credits=100)
    assert choose([small, large], PlacementRequest("")) == (large, "base")


def test_nobody_has_it_so_a_first_home_loads_it() -> None:
    workers = fleet(8)
    assert choose(workers) == (workers[0], "home")
    workers[0].in_flight = 3
    assert choose(workers) == (workers[1], "home")


def test_what_need_not_be_fetched_is_preferred() -> None:
    workers = fleet(8)
    workers[1].admitted = {DIGEST}
    workers[1].in_flight = 2
    assert choose(workers) == (workers[1], "home")


def test_a_copy_anywhere_is_used_while_it_has_room() -> None:
    workers = fleet(8)
    workers[5].resident = frozenset({DIGEST})
    workers[5].in_flight = 3
    assert choose(workers) == (workers[5], "resident")


def test_a_load_under_way_counts_as_a_home() -> None:
    workers = fleet(8)
    placement = Placer()
    first = ask(placement, workers, REQUEST, 0.0)
    assert first is not None
    placement.place(REQUEST, first, 0.0)
    for _ in range(3):
        next_one = ask(placement, workers, REQUEST, 0.1)
        assert next_one == Decision(first.worker, "loading")
        placement.place(REQUEST, next_one, 0.1)


def test_a_full_home_is_waited_for_as_long_as_a_load_takes() -> None:
    workers = fleet(4, load_bytes_s=1e8)  # half a second for this adapter
    workers[0].resident = frozenset({DIGEST})
    workers[0].in_flight = 4
    assert choose(workers, held_s=0.0) is None
    assert choose(workers, held_s=0.4) is None
    chosen = choose(workers, held_s=0.6)
    assert chosen is not None
    assert chosen[1] == "spread"
    assert chosen[0] is not workers[0]


def test_an_adapter_with_more_copies_than_its_demand_needs_waits_longer() -> None:
    workers = fleet(8)
    for worker in workers[:4]:
        worker.resident = frozenset({DIGEST})
        worker.in_flight = 4
    assert choose(workers, held_s=0.6) is None
    assert choose(workers, held_s=1.1) is not None  # nobody is held for ever


def test_copies_grow_with_demand_and_shrink_after_a_while() -> None:
    workers = fleet(4, resident=frozenset({DIGEST}), credits=10)
    placement = Placer()

    def used(now: float, count: int) -> int:
        """Workers that the adapter's sequences go to when so many are under way."""
        taken = set()
        for _ in range(count):
            decision = ask(placement, workers, REQUEST, now)
            assert decision is not None
            placement.place(REQUEST, decision, now)
            taken.add(decision.worker.worker_id)
        for worker in workers:
            for _ in range(worker.in_flight):
                worker.leave(DIGEST)
        return len(taken)

    assert used(0.0, 4) == 1
    assert used(1.0, 20) >= 3
    assert used(2.0, 4) >= 3  # not yet: demand may come back
    for now in range(33, 200, 31):
        used(float(now), 1)
    assert used(300.0, 4) == 1


def test_a_worker_that_knows_the_prompt_is_preferred_unless_it_is_fuller() -> None:
    workers = [view("a", credits=10), view("b", credits=10)]
    placement = Placer()
    request = PlacementRequest("", prefixes=prefix_keys("", "", list(range(300))))
    first = ask(placement, workers, request, 0.0)
    assert first is not None
    placement.place(request, first, 0.0)
    longer = PlacementRequest("", prefixes=prefix_keys("", "", list(range(500))))
    assert ask(placement, workers, longer, 0.0) == Decision(first.worker, "prefix")
    first.worker.in_flight = 8
    second = ask(placement, workers, longer, 0.0)
    assert second is not None
    assert second.worker is not first.worker
    assert not set(longer.prefixes) & set(prefix_keys("other", "", list(range(500))))


def test_without_room_in_the_kv_cache_few_are_sent_ahead() -> None:
    worker = view(credits=200, starting=4, free_kv=0.5)
    assert worker.has_room
    worker.free_kv = 0.01
    assert not worker.has_room


def test_a_load_that_never_arrives_is_forgotten() -> None:
    worker = view()
    worker.enter(DIGEST, 0.0)
    worker.arrived(5.0)
    assert worker.holds(DIGEST)
    worker.arrived(11.0)
    assert not worker.holds(DIGEST)
    worker.leave(DIGEST)


def test_a_worker_that_leaves_moves_only_its_own_adapters() -> None:
    names = [f"w{i}" for i in range(8)]
    for number in range(200):
        before = rank(f"key {number}", names)
        after = rank(f"key {number}", names[:-1])
        first = min(before, key=lambda name: before[name])
        assert after.get(first) == (None if first == "w7" else 0)


@pytest.mark.parametrize("able", [True, False])
def test_an_adapter_is_fetched_to_its_home(able: bool) -> None:
    workers = fleet(5)
    workers[0].ready = able
    assert Placer().home(REQUEST.home_key, workers) is workers[0 if able else 1]
    assert Placer().home(REQUEST.home_key, []) is None


VIEWS = st.lists(
    st.builds(
        view,
        st.text("abcdef", min_size=1, max_size=3),
        ready=st.booleans(),
        draining=st.booleans(),
        in_flight=st.integers(0, 5),
        credits=st.integers(1, 5),
        starting=st.integers(0, 40),
        load=st.integers(0, 9),
        free_kv=st.floats(0, 1),
        resident=st.sampled_from([frozenset(), frozenset({DIGEST}), frozenset({"other"})]),
        loading=st.sampled_from([frozenset(), frozenset({DIGEST})]),
        admitted=st.sampled_from([(), (DIGEST,)]),
    ),
    max_size=6,
    unique_by=lambda view: view.worker_id,
)


@given(VIEWS, st.sampled_from([PlacementRequest(""), REQUEST]), st.floats(0, 2))
def test_chosen_workers_have_room_and_reasons_are_true(
    views: list[WorkerView], request: PlacementRequest, held_s: float
) -> None:
    chosen = choose(views, request, held_s=held_s)
    with_room = [view for view in views if view.has_room]
    if chosen is None:
        assert not with_room or (request.adapter and held_s < 1.0)
        return
    worker, reason = chosen
    # One with a backlog is as good as full while another has none.
    candidates = [view for view in with_room if view.is_free] or with_room
    assert worker in candidates
    copies = [view for view in candidates if request.adapter and view.holds(request.adapter)]
    assert (worker in copies) == (reason in ("resident", "loading"))
    assert bool(copies) == (reason in ("resident", "loading"))
    assert (reason == "base") == (not request.adapter)
