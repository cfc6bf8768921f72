"""Which worker gets a sequence."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.placement import WorkerView, choose, choose_loader

DIGEST = "d"


def view(worker_id: str = "w", **fields: object) -> WorkerView:
    base = WorkerView(worker_id, ready=True, draining=False, in_flight=0, credits=4)
    return msgspec.structs.replace(base, **fields)


VIEWS = st.lists(
    st.builds(
        view,
        st.text("abcdef", min_size=1, max_size=3),
        ready=st.booleans(),
        draining=st.booleans(),
        in_flight=st.integers(0, 5),
        credits=st.integers(1, 5),
        load=st.integers(0, 9),
        resident=st.sampled_from([(), (DIGEST,), ("other",)]),
        loading=st.sampled_from([(), (DIGEST,)]),
        admitted=st.sampled_from([(), (DIGEST,)]),
    ),
    max_size=6,
    unique_by=lambda view: view.worker_id,
)


def test_resident_then_loading_then_admitted_then_least_loaded() -> None:
    views = [
        view("idle"),
        view("admitted", admitted=(DIGEST,), in_flight=1),
        view("loading", loading=(DIGEST,), in_flight=2),
        view("resident", resident=(DIGEST,), in_flight=3),
    ]
    reasons = []
    while (chosen := choose(views, DIGEST)) is not None:
        reasons.append(chosen)
        views = [view for view in views if view.worker_id != chosen[0]]
    assert reasons == [
        ("resident", "resident"),
        ("loading", "loading"),
        ("admitted", "admitted"),
        ("idle", "least_loaded"),
    ]


def test_the_base_goes_to_the_least_loaded_share() -> None:
    views = [view("small", in_flight=2, credits=4), view("large", in_flight=3, credits=100)]
    assert choose(views, None) == ("large", "least_loaded")


@given(VIEWS, st.sampled_from([None, DIGEST]))
def test_chosen_workers_have_room(views: list[WorkerView], digest: str | None) -> None:
    chosen = choose(views, digest)
    able = {v.worker_id: v for v in views if v.ready and not v.draining}
    with_room = {name for name, v in able.items() if v.in_flight < v.credits}
    if chosen is None:
        assert not with_room
        return
    worker_id, reason = chosen
    assert worker_id in with_room
    if digest is not None and reason != "resident":
        assert not any(digest in able[name].resident for name in with_room)


@given(VIEWS)
def test_a_loader_is_able_and_needs_no_credit(views: list[WorkerView]) -> None:
    able = {v.worker_id for v in views if v.ready and not v.draining}
    chosen = choose_loader(views)
    assert chosen in able if able else chosen is None
