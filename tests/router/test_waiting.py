"""The waiting queue: bounds, fairness between flows, strict priority, cancellation, deadlines."""

from collections import Counter

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

from router.waiting import QueueFull, Waiting, WaitingQueue

MAX_COUNT = 12
MAX_BYTES = 100


def entry(
    payload: str,
    flow: str | None = None,
    *,
    cost: int = 1,
    nbytes: int = 1,
    priority: int = 0,
    deadline: float | None = None,
) -> Waiting[str]:
    return Waiting(payload, flow, cost, nbytes, priority, deadline)


def drain(queue: WaitingQueue[str]) -> list[str]:
    out = []
    while (waiting := queue.pop()) is not None:
        out.append(waiting.payload)
    return out


def test_one_flow_keeps_its_order() -> None:
    queue: WaitingQueue[str] = WaitingQueue(10, 10)
    for name in "abc":
        queue.push(entry(name))
    assert drain(queue) == ["a", "b", "c"]


def test_a_flood_for_one_adapter_delays_itself() -> None:
    queue: WaitingQueue[str] = WaitingQueue(100, 100)
    for number in range(50):
        queue.push(entry(f"flood {number}", "flood"))
    queue.push(entry("lone", "lone"))
    assert "lone" in drain(queue)[:2]


def test_an_idle_flow_saves_up_no_credit() -> None:
    queue: WaitingQueue[str] = WaitingQueue(100, 100)
    for number in range(20):
        queue.push(entry(f"a{number}", "a"))
    for _ in range(10):
        queue.pop()
    for number in range(10):
        queue.push(entry(f"b{number}", "b"))
    first = [name[0] for name in drain(queue)[:10]]
    assert abs(first.count("a") - first.count("b")) <= 2


def test_leaving_and_coming_back_gives_no_extra_turn() -> None:
    queue: WaitingQueue[str] = WaitingQueue(100, 100)
    for number in range(10):
        queue.push(entry(f"a{number}", "a"))
    served: Counter[str] = Counter()
    for number in range(10):
        queue.push(entry(f"b{number}", "b"))  # always alone in its flow
        waiting = queue.pop()
        assert waiting is not None
        served[waiting.flow or ""] += 1
    assert served["a"] >= 4


def test_dear_sequences_take_fewer_turns() -> None:
    queue: WaitingQueue[str] = WaitingQueue(1000, 1000)
    for number in range(40):
        queue.push(entry(f"dear {number}", "dear", cost=9))
        queue.push(entry(f"cheap {number}", "cheap", cost=1))
    first = [name.split()[0] for name in drain(queue)[:20]]
    assert first.count("cheap") >= 17


def test_priority_comes_before_turns() -> None:
    queue: WaitingQueue[str] = WaitingQueue(10, 10)
    queue.push(entry("low", priority=1))
    queue.push(entry("normal", "x"))
    queue.push(entry("high", "x", priority=-5))
    assert drain(queue) == ["high", "normal", "low"]
    queue.push(entry("again", priority=3))
    assert drain(queue) == ["again"]


def test_limits() -> None:
    queue: WaitingQueue[str] = WaitingQueue(2, 100)
    queue.push(entry("a", nbytes=60))
    with pytest.raises(QueueFull, match="bytes"):
        queue.push(entry("b", nbytes=41))
    queue.push(entry("b", nbytes=40))
    with pytest.raises(QueueFull, match="sequences") as caught:
        queue.push(entry("c", nbytes=0))
    assert caught.value.retry_after_s > 0


def test_expired_entries_leave() -> None:
    queue: WaitingQueue[str] = WaitingQueue(10, 10)
    queue.push(entry("late", deadline=1.0))
    queue.push(entry("later", deadline=2.0))
    queue.push(entry("never"))
    assert [waiting.payload for waiting in queue.expire(1.0)] == ["late"]
    assert drain(queue) == ["later", "never"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20)), min_size=1, max_size=60))
def test_backlogged_flows_get_equal_work(arrivals: list[tuple[str, int]]) -> None:
    """While two flows both wait, their served costs differ by at most two of the dearest."""
    queue: WaitingQueue[str] = WaitingQueue(100, 100)
    left: Counter[str] = Counter()
    for flow, cost in arrivals:
        queue.push(entry(flow, flow, cost=cost))
        left[flow] += 1
    served: Counter[str] = Counter()
    dearest = max(cost for _, cost in arrivals)
    while (waiting := queue.pop()) is not None:
        served[waiting.payload] += waiting.cost
        left[waiting.payload] -= 1
        backlogged = [flow for flow in left if left[flow] > 0]
        work = [served[flow] for flow in backlogged]
        if work:
            assert max(work) - min(work) <= 2 * dearest


class QueueMachine(RuleBasedStateMachine):
    """Whatever the order of calls, nothing is lost, repeated or miscounted."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.queue: WaitingQueue[str] = WaitingQueue(MAX_COUNT, MAX_BYTES)
        self.waiting: dict[str, tuple[int, Waiting[str]]] = {}
        self.count = 0
        self.now = 0.0

    @rule(
        target=tickets,
        flow=st.sampled_from([None, "a", "b", "c"]),
        cost=st.integers(1, 50),
        nbytes=st.integers(0, 30),
        priority=st.integers(-1, 1),
        life=st.none() | st.integers(1, 5),
    )
    def push(
        self, flow: str | None, cost: int, nbytes: int, priority: int, life: int | None
    ) -> str:
        self.count += 1
        name = f"{self.count}"
        deadline = None if life is None else self.now + life
        new = Waiting(name, flow, cost, nbytes, priority, deadline)
        fits = len(self.waiting) < MAX_COUNT and self.queue.nbytes + nbytes <= MAX_BYTES
        if fits:
            self.waiting[name] = (self.queue.push(new), new)
        else:
            with pytest.raises(QueueFull):
                self.queue.push(new)
        return name

    @rule()
    def pop(self) -> None:
        out = self.queue.pop()
        if out is None:
            assert not self.waiting
            return
        _, expected = self.waiting.pop(out.payload)
        assert out is expected
        others = [other for _, other in self.waiting.values()]
        assert all(other.priority >= out.priority for other in others)
        same = [o for o in others if (o.flow, o.priority) == (out.flow, out.priority)]
        assert all(int(other.payload) > int(out.payload) for other in same)

    @rule(name=consumes(tickets))
    def cancel(self, name: str) -> None:
        if name in self.waiting:
            ticket, _ = self.waiting.pop(name)
            assert self.queue.cancel(ticket)
            assert not self.queue.cancel(ticket)

    @rule(step=st.integers(0, 3))
    def pass_time(self, step: int) -> None:
        self.now += step
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
        assert len(self.queue) == len(self.waiting)
        assert self.queue.nbytes == sum(waiting.nbytes for _, waiting in self.waiting.values())
        assert {waiting.payload for waiting in self.queue} == set(self.waiting)


TestQueueMachine = QueueMachine.TestCase
