"""Scores of requests: whose they may be, and what is remembered of them."""

import time
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from loraplex.adapters.ref import AdapterRef
from loraplex.router.call import RequestError
from loraplex.router.names.judged_requests import KEPT_S, MOST_KEPT, JudgedRequests
from loraplex.router.names.served import OwnedName, ServedAdapter
from loraplex.router.operations.feedback import Feedback
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.tenancy.keys import ApiKey, Caller
from tests.router.fake_worker import make_manifest

ADAPTER = ServedAdapter(
    "mine", AdapterRef("hub", "org/a"), None, make_manifest("org/a"), OwnedName("mine"), "r"
)


def caller(tenant: str, *models: str) -> Caller:
    return Caller(ApiKey(id=tenant, digest="", tenant=tenant, models=models))


async def test_only_the_requests_tenant_scores_it_with_a_key_that_opens_the_adapter() -> None:
    metrics = RouterMetrics(CollectorRegistry(), 1)
    aliases = cast("Any", {})  # no name has a rollout any more
    feedback = Feedback(MemoryStore(time.time), aliases, metrics)
    metrics.judged_requests.note("a", "1", ADAPTER, time.time())
    assert await feedback.take(caller("b", "*"), "1", 0.5) == "unknown"
    with pytest.raises(RequestError, match="does not open"):
        await feedback.take(caller("a", "other"), "1", 0.5)
    assert await feedback.take(caller("a", "other", "m*"), "1", 0.5) == "over"
    assert await feedback.take(caller("a", "mine"), "1", 0.5) == "again"


async def test_a_key_for_one_of_several_bases_scores_its_adapters() -> None:
    metrics = RouterMetrics(CollectorRegistry(), 1)
    feedback = Feedback(MemoryStore(time.time), cast("Any", {}), metrics)
    adapter = msgspec.structs.replace(ADAPTER, base="org/blue")
    metrics.judged_requests.note("a", "1", adapter, time.time())
    with pytest.raises(RequestError, match="does not open"):
        await feedback.take(caller("a", "org/red:*"), "1", 0.5)
    assert await feedback.take(caller("a", "org/blue:*"), "1", 0.5) == "over"


def noted(requests: JudgedRequests, tenant: str, count: int, now: float) -> int:
    """How many of so many requests are remembered, each written at once."""
    before = requests.forgotten
    for number in range(count):
        requests.note(tenant, str(number), ADAPTER, now)
        if requests.oldest() is not None:
            requests.written()
    return count - (requests.forgotten - before)


def test_a_router_remembers_so_many_and_some_of_each_tenant() -> None:
    requests = JudgedRequests()
    most = noted(requests, "a", MOST_KEPT, 0.0)
    assert most == MOST_KEPT * 8 // 9 + 1
    free = MOST_KEPT - most
    assert noted(requests, "b", free, 1.0) == free * 8 // 9 + 1
    assert noted(requests, "a", 1, KEPT_S - 1.0) == 0
    assert noted(requests, "c", 1, KEPT_S - 1.0) == 1
    assert noted(requests, "a", MOST_KEPT, KEPT_S) > MOST_KEPT // 2


def test_while_the_store_is_away_few_wait_of_any_tenant() -> None:
    requests = JudgedRequests()
    for number in range(MOST_KEPT // 4):
        requests.note("a", str(number), ADAPTER, 0.0)
    before = requests.forgotten
    assert before > MOST_KEPT // 8
    requests.note("b", "1", ADAPTER, 0.0)
    assert requests.forgotten == before
