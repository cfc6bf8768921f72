"""What requests of versions were like: counted by routers, added up over time."""

import time
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from loraplex.adapters.ref import AdapterRef
from loraplex.router.api.openai import completions
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import GenerationCall
from loraplex.router.names.rollout_tally import SLICE_S, Outcomes, RolloutTally
from loraplex.router.names.served import OwnedName, ServedAdapter
from loraplex.router.policy.guards import GuardSample, bucket_of
from loraplex.router.policy.rollout import MAX_WINDOW_S
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.store import Store, StoreDown
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.telemetry.observer import RequestObserver
from loraplex.router.telemetry.request import in_hand
from loraplex.router.tenancy.keys import NOBODY
from loraplex.router.tenancy.metering import Admission, Metering
from loraplex.server.protocol import TokenEvent
from tests.router.fake_worker import make_manifest

MANIFEST = make_manifest("org/one")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_routers_and_spans_add_up(store: Store) -> None:
    clock = Clock()
    seen = [Outcomes(), Outcomes()]
    tallies = [RolloutTally(store, outcomes, clock) for outcomes in seen]
    for _ in range(4):
        for outcomes, tally in zip(seen, tallies, strict=True):
            outcomes.add("r", "aa", GuardSample(False, 0.5, 0.01))
            outcomes.add("r", "aa", GuardSample(True))
            outcomes.add("r", "bb", GuardSample(False, 0.5))
            outcomes.add("other", "aa", GuardSample(True))
            await tally.flush()
        clock.now += SLICE_S
    for tally in tallies:
        for _ in range(2):  # the second time closed spans are known
            found = await tally.read("r", "aa", 300, 0)
            assert (found.requests, found.failed) == (16, 8)
            assert found.first_token == {bucket_of(0.5): 8}
            assert found.token == {bucket_of(0.01): 8}
        assert (await tally.read("r", "aa", 300, 1011)).requests == 8, "whole spans since then"
        assert (await tally.read("r", "aa", SLICE_S, 0)).requests == 4
        assert (await tally.read("r", "cc", 300, 0)).requests == 0
        own = await tally.read_own("r", "aa", 300, 0)
        assert (own.requests, own.failed, own.token) == (8, 4, {bucket_of(0.01): 4})
        assert (await tally.read_own("r", "aa", 300, 1011)).requests == 4
    clock.now += 300
    assert (await tallies[0].read("r", "aa", 100, 0)).requests == 0


async def test_what_could_not_be_reported_is_reported_later() -> None:
    class Down(MemoryStore):
        is_down = True

        async def count(self, *arguments: object) -> None:
            if self.is_down:
                raise StoreDown
            await super().count(*arguments)  # type: ignore[arg-type]

    store, outcomes, clock = Down(time.time), Outcomes(), Clock()
    tally = RolloutTally(store, outcomes, clock)
    for number in range(3):
        outcomes.add("r", "aa", GuardSample(True))
        outcomes.add("s", "aa", GuardSample(True))
        with pytest.raises(StoreDown):
            await tally.flush()
        assert (await tally.read_own("r", "aa", 300, 0)).failed == number + 1
        clock.now += SLICE_S
    outcomes.add("r", "aa", GuardSample(True))
    store.is_down = False
    await tally.flush()
    await tally.flush()
    assert (await tally.read("r", "aa", 300, 0)).failed == 4
    assert (await tally.read("s", "aa", 300, 0)).failed == 3
    assert (await tally.read_own("r", "aa", 300, 0)).failed == 4
    clock.now += MAX_WINDOW_S + SLICE_S
    outcomes.add("s", "aa", GuardSample(True))
    await tally.flush()
    assert len(tally._own) == 1, "what no window reaches is forgotten"


def completion() -> GenerationCall:
    body = b'{"model": "base", "prompt": "x"}'
    return completions.parse(body, ApiLimits(base_names=("base",))).call


def counters(
    *, load_s: float | None = None, tokens: int = 3, fails: bool | None = None
) -> list[str]:
    """Counters of one request in a rollout. fails: excused or not."""
    metrics, clock = RouterMetrics(CollectorRegistry(), 10), Clock()
    served = ServedAdapter(
        "mine", AdapterRef("hub", "org/one"), None, MANIFEST, OwnedName("mine"), "r"
    )
    store = MemoryStore(clock)
    metering = Metering(store, Admission(store, lambda: True, "open", "router"), clock)
    charge = metering.charge(NOBODY, "x")
    observer = RequestObserver(in_hand(), metrics, charge, lambda error: None, clock)
    observer.asked(completion(), "", "base", "")
    observer.queued(served, 1)
    sequence = observer.sequence(served.digest)
    for index in range(tokens):
        clock.now += 0.5
        sequence.token(TokenEvent("x", 0, 0, index, (7,), load_s=load_s), clock.now)
    if fails is not None:
        observer.failed(excused=fails)
    elif tokens:
        sequence.ended("stop")
    clock.now += 1.0
    observer.closed()
    counts = metrics.outcomes.take().get("r", Counter())
    return sorted(name.removeprefix(f"{MANIFEST.digest}:") for name in counts)


def test_what_a_request_says_of_its_version() -> None:
    half = bucket_of(0.5)
    assert counters() == [f"first:{half}", "requests", f"token:{half}"]
    assert counters(load_s=2.0) == ["requests", f"token:{half}"], "a cold start is not its fault"
    assert counters(fails=False) == ["failed", "requests"]
    assert counters(fails=True) == [], "nor is a full queue"
    assert counters(tokens=0) == [f"first:{bucket_of(1.0)}", "requests"], "who left has waited"
