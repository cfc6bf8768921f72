"""The waiting queue: bounds, turns of tenants and adapters, strict priority, cancellation, time."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from loraplex.router.policy.placement.placement import PlacementRequest
from loraplex.router.policy.queue.queue_limits import QueueFull, QueueLimits
from loraplex.router.policy.queue.waiting import Waiting, WaitingQueue

MAX_COUNT = 12
MAX_BYTES = 100
ROOMY = QueueLimits(10_000, 10_000)


def entry(
    payload: str,
    adapter: str = "",
    *,
    tenant: str = "",
    cost: int = 1,
    max_tokens: int = 0,
    nbytes: int = 0,
    priority: int = 0,
    deadline: float | None = None,
) -> Waiting[str]:
    request = PlacementRequest(adapter)
    return Waiting(payload, tenant, request, cost, max_tokens, nbytes, priority, deadline)


def weighing(weight: float, waiting: Waiting[str]) -> Waiting[str]:
    """weight: of its tenant."""
    return msgspec.structs.replace(waiting, weight=weight)


def resumed(payload: str, nbytes: int = 0) -> Waiting[str]:
    first = new_queue()
    bill = first.take(first.push(entry(payload), 0.0), 0.0)
    return msgspec.structs.replace(entry(payload, nbytes=nbytes), bill=bill)


def new_queue(limits: QueueLimits = ROOMY) -> WaitingQueue[str]:
    return WaitingQueue(limits)


def pop(queue: WaitingQueue[str], now: float = 0.0, load_price: float = 0.0) -> Waiting[str] | None:
    for candidate in queue.candidates(now):
        queue.take(candidate.ticket, now, load_price)
        return candidate.entry
    return None


def drain(queue: WaitingQueue[str]) -> list[str]:
    out = []
    while (waiting := pop(queue)) is not None:
        out.append(waiting.payload)
    return out


def test_one_flow_keeps_its_order() -> None:
    queue = new_queue()
    for name in "abc":
        queue.push(entry(name), 0.0)
    assert drain(queue) == ["a", "b", "c"]


@pytest.mark.parametrize("by", ["tenant", "adapter"])
def test_a_flood_delays_itself(by: str) -> None:
    queue = new_queue()
    for number in range(50):
        queue.push(entry(f"flood {number}", **{by: "flood"}), 0.0)  # type: ignore[arg-type]
    queue.push(entry("lone", **{by: "lone"}), 0.0)  # type: ignore[arg-type]
    assert "lone" in drain(queue)[:2]


def test_many_adapters_give_a_tenant_no_more_turns() -> None:
    queue = new_queue()
    for number in range(40):
        queue.push(entry("many", f"adapter {number}", tenant="many"), 0.0)
        queue.push(entry("one", "its own", tenant="one"), 0.0)
    assert Counter(drain(queue)[:20]) == {"many": 10, "one": 10}


def test_an_idle_tenant_saves_up_nothing() -> None:
    queue = new_queue()
    for number in range(20):
        queue.push(entry(f"a{number}", tenant="a"), 0.0)
    for _ in range(10):
        pop(queue)
    for number in range(10):
        queue.push(entry(f"b{number}", tenant="b"), 0.0)
    first = [name[0] for name in drain(queue)[:10]]
    assert abs(first.count("a") - first.count("b")) <= 2


def test_leaving_and_coming_back_gives_no_extra_turn() -> None:
    queue = new_queue()
    for number in range(10):
        queue.push(entry(f"a{number}", tenant="a"), 0.0)
    served: Counter[str] = Counter()
    for number in range(10):
        queue.push(entry(f"b{number}", tenant="b"), 0.0)  # always alone of its tenant
        waiting = pop(queue)
        assert waiting is not None
        served[waiting.tenant] += 1
    assert served["a"] >= 4


def test_dear_sequences_take_fewer_turns() -> None:
    queue = new_queue()
    for number in range(40):
        queue.push(entry(f"dear {number}", tenant="dear", cost=9), 0.0)
        queue.push(entry(f"cheap {number}", tenant="cheap", cost=1), 0.0)
    first = [name.split()[0] for name in drain(queue)[:20]]
    assert first.count("cheap") >= 17


def test_loads_are_priced_in() -> None:
    queue = new_queue()
    for number in range(10):
        queue.push(entry("cold", f"adapter {number}", tenant="cold"), 0.0)
        queue.push(entry("warm", "adapter", tenant="warm"), 0.0)
    order = []
    while (candidate := next(queue.candidates(0.0), None)) is not None:
        is_cold = candidate.entry.tenant == "cold"
        queue.take(candidate.ticket, 0.0, 8.0 if is_cold else 0.0)
        order.append(candidate.entry.payload)
    assert order[:10].count("warm") >= 8


def test_generated_tokens_are_charged_as_they_come_and_unused_ones_come_back() -> None:
    """Both ask for the same; one generates far more than was expected, the other nothing."""
    queue = new_queue()
    bills = {}
    for tenant in ("long", "short"):
        ticket = queue.push(entry(tenant, tenant=tenant, max_tokens=1000), 0.0)
        bills[tenant] = queue.take(ticket, 0.0)
    bills["long"].generated(1000)
    for bill in bills.values():
        bill.settle()
        bill.settle()
    for _ in range(400):
        queue.push(entry("long", tenant="long", cost=10), 0.0)
        queue.push(entry("short", tenant="short", cost=10), 0.0)
    # 2 a generated token: the other may have work of 2000 first.
    first = drain(queue)[:220]
    assert first.count("short") == pytest.approx(210, abs=2)


def test_a_missing_max_tokens_is_reckoned_by_experience() -> None:
    """One tenant always asks for all that fits, and needs as little as the other."""
    queue = new_queue()
    asked = {"open": 100_000, "exact": 20}
    for _ in range(50):
        for tenant, max_tokens in asked.items():
            ticket = queue.push(entry(tenant, tenant=tenant, max_tokens=max_tokens), 0.0)
            bill = queue.take(ticket, 0.0)
            bill.generated(20)
            bill.settle()
    for _ in range(40):
        for tenant, max_tokens in asked.items():
            queue.push(entry(tenant, tenant=tenant, max_tokens=max_tokens), 0.0)
    assert Counter(drain(queue)[:40])["open"] == pytest.approx(20, abs=2)


def test_a_request_cancelled_before_a_token_is_no_observation_of_outputs() -> None:
    queue = new_queue()
    for _ in range(50):
        left = queue.push(entry("left", tenant="impatient", max_tokens=100), 0.0)
        queue.take(left, 0.0).settle()
    for _ in range(40):
        for tenant in ("impatient", "patient"):
            queue.push(entry(tenant, tenant=tenant, max_tokens=100), 0.0)
    assert Counter(drain(queue)[:40])["impatient"] == pytest.approx(20, abs=2)


def test_who_is_taken_again_keeps_its_bill() -> None:
    queue = new_queue()
    queue.shares.rows = 4
    for _ in range(50):
        first = entry("x", tenant="restarted")
        bill = queue.take(queue.push(first, 0.0), 0.0)
        again = msgspec.structs.replace(first, bill=bill)
        assert queue.take(queue.push(again, 0.0), 0.0) is bill
        bill.settle()
    queue.push(entry("y", tenant="other"), 0.0)
    assert not queue.shares.is_over("restarted")


def test_who_is_held_is_passed_over_and_stays_first() -> None:
    queue = new_queue()
    queue.push(entry("held", "a"), 0.0)
    queue.push(entry("next", "b"), 0.0)
    held, other = list(queue.candidates(1.0))
    queue.hold(held.ticket, 1.0)
    queue.take(other.ticket, 1.0)
    again = next(queue.candidates(3.0))
    assert (again.entry.payload, again.held_s) == ("held", 2.0)
    queue.hold(again.ticket, 3.0)
    assert next(queue.candidates(4.0)).held_s == 3.0


def test_who_waits_long_keeps_its_share() -> None:
    queue = new_queue()
    for _ in range(30):
        queue.take(queue.push(entry("many", tenant="many"), 0.0), 0.0)
    queue.push(entry("one", tenant="one"), 0.0)
    now = 0.0
    while now < 30.0:
        now += 0.25
        queue.age(now)
    queue.push(entry("many", tenant="many"), now)
    assert queue.shares.is_over("many")


@pytest.mark.parametrize(("priority", "weight"), [(0, 1.0), (1, 1.0), (0, 0.01), (-1, 100.0)])
def test_a_flow_that_is_far_ahead_waits_no_longer_than_ageing_takes(
    priority: int, weight: float
) -> None:
    """An adapter whose one sequence of the past was very long, beside a steady sibling."""

    def one(name: str, cost: int) -> Waiting[str]:
        return weighing(weight, entry(name, name, cost=cost, priority=priority))

    queue = new_queue()
    queue.take(queue.push(one("dear", 100_000), 0.0), 0.0)
    queue.push(one("dear", 1), 0.0)
    now = 0.0
    while True:
        queue.push(one("steady", 10), now)
        queue.age(now)
        waiting = pop(queue, now)
        assert waiting is not None
        if waiting.payload == "dear":
            break
        now += 0.25
    assert 5.0 < now < 60.0


def test_priority_comes_before_turns() -> None:
    queue = new_queue()
    queue.push(entry("low", priority=1), 0.0)
    queue.push(entry("normal", "x"), 0.0)
    queue.push(entry("high", "x", priority=-5), 0.0)
    assert drain(queue) == ["high", "normal", "low"]
    queue.push(entry("again", priority=3), 0.0)
    assert drain(queue) == ["again"]


def test_limits() -> None:
    queue = new_queue(QueueLimits(2, 100))
    queue.push(entry("a", nbytes=60), 0.0)
    with pytest.raises(QueueFull, match="bytes"):
        queue.push(entry("b", nbytes=41), 0.0)
    queue.push(entry("b", nbytes=40), 0.0)
    with pytest.raises(QueueFull, match="sequences") as caught:
        queue.push(entry("c"), 0.0)
    assert caught.value.retry_after_s > 0
    queue.push(resumed("again", nbytes=50), 0.0)  # was accepted long ago


def test_a_tenants_own_limits() -> None:
    queue = new_queue(QueueLimits(100, 1000, tenant_count=2, tenant_nbytes=50))
    queue.push(entry("a", tenant="t"), 0.0)
    with pytest.raises(QueueFull, match="your share .* bytes"):
        queue.push(entry("b", tenant="t", nbytes=51), 0.0)
    queue.push(entry("b", tenant="t", nbytes=50), 0.0)
    with pytest.raises(QueueFull, match="your share .* sequences"):
        queue.push(entry("c", tenant="t"), 0.0)
    queue.push(entry("c", tenant="other"), 0.0)


def test_a_flood_leaves_room_for_others() -> None:
    queue = new_queue(QueueLimits(90, 1000))
    for number in range(81):
        queue.push(entry(f"{number}", tenant="flood"), 0.0)
    with pytest.raises(QueueFull, match="your share"):
        queue.push(entry("one too many", tenant="flood"), 0.0)
    queue.push(entry("other", tenant="other"), 0.0)


def test_retry_after_follows_the_drain() -> None:
    def hint(per_second: int) -> float:
        queue = new_queue(QueueLimits(100, 1000))
        now = 0.0
        for number in range(30 * per_second):
            queue.take(queue.push(entry("x"), now), now)
            now = number / per_second
        for number in range(100):
            queue.push(entry("x", tenant=f"{number}"), now)
        with pytest.raises(QueueFull) as caught:
            queue.push(entry("x"), now)
        return caught.value.retry_after_s

    assert hint(10) == pytest.approx(5.0, rel=0.1)  # half of 100 at ten a second
    assert hint(2) == pytest.approx(25.0, rel=0.1)
    assert hint(100) == 1.0


def test_expired_entries_leave() -> None:
    queue = new_queue()
    queue.push(entry("late", deadline=1.0), 0.0)
    queue.push(entry("later", deadline=2.0), 0.0)
    queue.push(entry("never"), 0.0)
    assert [waiting.payload for waiting in queue.expire(1.0)] == ["late"]
    assert drain(queue) == ["later", "never"]
    assert queue.expire(9.0) == []


def test_new_ones_can_be_withdrawn() -> None:
    queue = new_queue()
    queue.push(entry("new"), 0.0)
    queue.push(resumed("resumed"), 0.0)
    assert [waiting.payload for waiting in queue.withdraw_new()] == ["new"]
    assert drain(queue) == ["resumed"]


ARRIVALS = st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"), st.integers(1, 20))


@given(st.lists(ARRIVALS, min_size=1, max_size=60))
def test_backlogged_tenants_get_equal_work(arrivals: list[tuple[str, str, int]]) -> None:
    """While two tenants both wait, their served costs differ by at most two of the dearest."""
    queue = new_queue()
    left: Counter[str] = Counter()
    for tenant, adapter, cost in arrivals:
        queue.push(entry(tenant, adapter, tenant=tenant, cost=cost), 0.0)
        left[tenant] += 1
    served: Counter[str] = Counter()
    dearest = max(cost for _, _, cost in arrivals)
    while (waiting := pop(queue)) is not None:
        served[waiting.payload] += waiting.prompt_tokens
        left[waiting.payload] -= 1
        work = [served[tenant] for tenant in left if left[tenant] > 0]
        if work:
            assert max(work) - min(work) <= 2 * dearest


WEIGHTS = {"a": 1.0, "b": 0.5, "c": 3.0, "d": 10.0}


@given(st.lists(ARRIVALS, min_size=1, max_size=80))
def test_backlogged_tenants_get_work_by_their_weights(arrivals: list[tuple[str, str, int]]) -> None:
    """While two both wait, what they were served for their weight differs by two of the dearest."""
    queue = new_queue()
    left: Counter[str] = Counter()
    for tenant, adapter, cost in arrivals:
        one = entry(tenant, adapter, tenant=tenant, cost=cost)
        queue.push(weighing(WEIGHTS[tenant], one), 0.0)
        left[tenant] += 1
    served: Counter[str] = Counter()
    dearest = max(cost / WEIGHTS[tenant] for tenant, _, cost in arrivals)
    while (waiting := pop(queue)) is not None:
        served[waiting.payload] += waiting.prompt_tokens
        left[waiting.payload] -= 1
        work = [served[tenant] / WEIGHTS[tenant] for tenant in left if left[tenant] > 0]
        if work:
            assert max(work) - min(work) <= 2 * dearest


def test_a_weight_of_three_is_three_turns_to_one() -> None:
    queue = new_queue()
    for _ in range(40):
        queue.push(weighing(3.0, entry("big", tenant="big", cost=7)), 0.0)
        queue.push(entry("small", tenant="small", cost=7), 0.0)
    first = Counter(drain(queue)[:40])
    assert first == {"big": 30, "small": 10}


def test_what_was_charged_too_early_comes_back_by_weight() -> None:
    """A tenant of weight 4 whose outputs are short ends where it would be had that been known."""
    queue = new_queue()
    order: list[str] = []
    for name in ("big", "small"):
        for _ in range(20):
            one = entry(name, tenant=name, cost=1, max_tokens=100)
            queue.push(weighing(4.0 if name == "big" else 1.0, one), 0.0)
    for _ in range(20):
        candidate = next(queue.candidates(0.0))
        bill = queue.take(candidate.ticket, 0.0)
        bill.generated(1)
        bill.settle()
        order.append(candidate.entry.payload)
    assert Counter(order)["big"] == 16


@given(
    st.lists(
        st.tuples(ARRIVALS, st.integers(-1, 1), st.sampled_from([0.01, 1.0, 100.0])), min_size=1
    )
)
def test_a_band_goes_before_the_next_whatever_the_weights(
    arrivals: list[tuple[tuple[str, str, int], int, float]],
) -> None:
    queue = new_queue()
    for (tenant, adapter, cost), priority, weight in arrivals:
        one = entry(f"{priority}", adapter, tenant=tenant, cost=cost, priority=priority)
        queue.push(weighing(weight, one), 0.0)
    bands = [int(name) for name in drain(queue)]
    assert bands == sorted(bands)


class QueueMachine(RuleBasedStateMachine):
    """Whatever the order of calls, nothing is lost, repeated or miscounted."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.queue = new_queue(QueueLimits(MAX_COUNT, MAX_BYTES))
        self.waiting: dict[str, tuple[int, Waiting[str]]] = {}
        self.count = 0
        self.now = 0.0

    @rule(
        target=tickets,
        tenant=st.sampled_from(["", "t", "u"]),
        adapter=st.sampled_from(["", "a", "b"]),
        cost=st.integers(1, 50),
        nbytes=st.integers(0, 30),
        priority=st.integers(-1, 1),
        life=st.none() | st.integers(1, 5),
    )
    def push(
        self,
        tenant: str,
        adapter: str,
        cost: int,
        nbytes: int,
        priority: int,
        life: int | None,
    ) -> str:
        self.count += 1
        name = f"{self.count}"
        deadline = None if life is None else self.now + life
        new = entry(
            name,
            adapter,
            tenant=tenant,
            cost=cost,
            nbytes=nbytes,
            priority=priority,
            deadline=deadline,
        )
        held = self.queue.capacity.held
        fits = held.count < MAX_COUNT and held.nbytes + nbytes <= MAX_BYTES
        alone = not any(waiting.tenant == tenant for _, waiting in self.waiting.values())
        try:
            self.waiting[name] = (self.queue.push(new, self.now), new)
        except QueueFull:
            assert not (fits and alone)
        else:
            assert fits
        return name

    @rule(load_price=st.integers(0, 30), generated=st.integers(0, 50))
    def take(self, load_price: int, generated: int) -> None:
        tried = list(self.queue.candidates(self.now))
        assert bool(tried) == bool(self.waiting)
        if not tried:
            return
        out = tried[0].entry
        assert self.waiting.pop(out.payload) == (tried[0].ticket, out)
        bill = self.queue.take(tried[0].ticket, self.now, load_price)
        bill.generated(generated)
        bill.settle()
        others = [other for _, other in self.waiting.values()]
        assert all(other.priority >= out.priority for other in others)
        same = [o for o in others if (o.flow, o.priority) == (out.flow, out.priority)]
        assert all(int(other.payload) > int(out.payload) for other in same)

    @rule(which=st.integers(0, 5))
    def hold(self, which: int) -> None:
        tried = list(self.queue.candidates(self.now))
        if which < len(tried):
            self.queue.hold(tried[which].ticket, self.now)

    @rule(name=consumes(tickets))
    def cancel(self, name: str) -> None:
        if name in self.waiting:
            ticket, _ = self.waiting.pop(name)
            assert self.queue.cancel(ticket)
            assert not self.queue.cancel(ticket)

    @rule(step=st.integers(0, 3))
    def pass_time(self, step: int) -> None:
        self.now += step
        self.queue.age(self.now)
        late = {out.payload for out in self.queue.expire(self.now)}
        expected = {
            name
            for name, (_, waiting) in self.waiting.items()
            if waiting.deadline is not None and waiting.deadline <= self.now
        }
        assert late == expected
        for name in late:
            del self.waiting[name]

    @invariant()
    def counts_agree(self) -> None:
        held = self.queue.capacity.held
        assert len(self.queue) == held.count == len(self.waiting)
        assert held.nbytes == sum(waiting.nbytes for _, waiting in self.waiting.values())
        assert {waiting.payload for waiting in self.queue} == set(self.waiting)
        flows = {(waiting.flow, waiting.priority) for _, waiting in self.waiting.values()}
        assert len(list(self.queue.candidates(self.now))) == len(flows)


TestQueueMachine = QueueMachine.TestCase
