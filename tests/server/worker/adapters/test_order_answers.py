"""Each order hears of itself, whatever else was ordered for the same adapter meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certifying.certificates import CertifyOptions
from tests.server.engine.harness import limits
from tests.server.worker.slabs import EXTENT
from tests.server.worker.tiers import ROUTER, Tiers


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    device = limits(arena_extents=4, adapter_slots=2, extent_bytes=EXTENT)
    tiers = Tiers(tmp_path, device, CertifyOptions(device.vocab_size, device.eos_token_ids))
    tiers.store("a", 1)
    yield tiers
    tiers.close()
    assert tiers.wrong == []


def outcome(tiers: Tiers, order_id: str) -> str | None:
    """The one report's error, once all has come to rest."""
    for _ in range(20):
        tiers.round()
    (report,) = tiers.reports[order_id]
    return report.error


def test_an_eviction_does_not_hear_of_the_load_before_it(tiers: Tiers) -> None:
    tiers.order("first", "load", "a")
    assert outcome(tiers, "first") is None
    tiers.order("second", "load", "a")
    tiers.turns(2)
    tiers.engine_turn()  # its answer is on the way
    tiers.order("evict", "evict", "a")
    assert outcome(tiers, "evict") is None
    assert outcome(tiers, "second") is None
    assert tiers.engine.scheduler.arena.stage("a") == "absent"


def test_a_load_does_not_hear_of_the_pin_before_it(tiers: Tiers) -> None:
    tiers.order("evict", "evict", "a")
    tiers.turns(2)
    tiers.do(lambda: tiers.orders.pin(ROUTER, ["a"]))
    tiers.engine_turn()  # the eviction's refusal is on the way
    tiers.order("load", "load", "a")
    assert outcome(tiers, "load") is None
    assert outcome(tiers, "evict") == "the adapter is pinned"
    assert tiers.engine.scheduler.arena.stage("a") == "ready"


def test_an_eviction_is_carried_out_by_the_loss_of_the_engine(tiers: Tiers) -> None:
    tiers.order("first", "load", "a")
    assert outcome(tiers, "first") is None
    tiers.order("evict", "evict", "a")
    tiers.turns(2)
    tiers.order("load", "load", "a")
    tiers.turns(2)
    tiers.restart_engine()
    assert outcome(tiers, "evict") is None
    assert outcome(tiers, "load") == "the engine was lost"
    assert tiers.tier.state("a") == "absent"


@pytest.mark.parametrize("how", ["withdrawn", "disconnected", "unpinned"])
def test_what_its_router_wants_no_more_is_not_loaded(tiers: Tiers, how: str) -> None:
    """It pushes out nothing, though it was asked for already."""
    if how == "unpinned":
        tiers.do(lambda: tiers.orders.pin(ROUTER, ["a"]))
    else:
        tiers.order("load", "load", "a")
    tiers.turns(2)
    tiers.engine_turn()
    tiers.hear(9)
    assert tiers.engine.scheduler.loads.loading == ("a",)
    if how == "unpinned":
        tiers.do(lambda: tiers.orders.pin(ROUTER, []))
    elif how == "withdrawn":
        tiers.order("other", "withdraw")
        tiers.order("load", "withdraw")
    else:
        tiers.do(lambda: tiers.orders.disconnected(ROUTER))
    for _ in range(20):
        tiers.round()
    assert tiers.engine.scheduler.arena.stage("a") == "absent"
    assert not any(tiers.reports.values())
    assert not tiers.handed_over


def test_a_preload_that_two_ordered_is_withdrawn_by_one(tiers: Tiers) -> None:
    for name in ("first", "second"):
        tiers.order(name, "load", "a")
    tiers.turns(2)
    tiers.engine_turn()
    tiers.order("first", "withdraw")
    assert outcome(tiers, "second") is None
    assert not tiers.reports["first"]


def test_an_order_is_answered_whatever_goes_wrong(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tiers.threads, "submit", no_thread)
    tiers.order("status", "status", "a")
    assert outcome(tiers, "status") == "the order could not be carried out"
