"""Whose prompt is worth waiting for, and what is found cached: as if every page had been hashed."""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraplex.server.engine.memory.pages import PageHash, page_hash, root_hash
from loraplex.server.engine.scheduling import kv
from loraplex.server.engine.scheduling.kv import HASHED_PER_PLAN, SHARE_WORTH_TOKENS, SequencePages
from loraplex.server.engine.scheduling.sequence import Precedence, Sequence
from tests.server.engine.harness import Harness, limits, make_request
from tests.server.invariants import check_pool

PAGE = 4
PAGES = 120


def sequence(tokens: Tokens[int]) -> Sequence:
    return Sequence(0, make_request(list(tokens)), Precedence(0, 0), len(tokens) + 4, None)


class Walks(RuleBasedStateMachine):
    """Prompts of few kinds of pages, so that they share beginnings of all lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = SequencePages(limits(num_pages=PAGES, page_size=PAGE))
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    @rule(turns=st.lists(st.sampled_from("ab"), max_size=4), length=st.integers(1, 30))
    def arrive(self, turns: list[str], length: int) -> None:
        """All `a` but for a `b` where it turns: it leaves the others there."""
        tokens = [5] * length * PAGE
        for at, kind in enumerate(turns):
            if kind == "b":
                tokens[min(len(tokens) - 1, at * 7 * PAGE)] = 6
        self.waiting.append(sequence(tokens))

    @rule()
    def admit(self) -> None:
        for waiting in list(self.waiting):
            expected = self.is_worth_waiting(waiting)
            assert self.pages.is_computed_elsewhere(waiting) == expected
            if expected:
                continue
            cached = self.cached(waiting)
            if not self.pages.take(waiting, 0):
                return
            assert waiting.num_computed == cached * PAGE
            self.waiting.remove(waiting)
            self.running.append(waiting)

    @rule(which=st.integers(0, 99), chunk=st.integers(1, 40))
    def compute(self, which: int, chunk: int) -> None:
        if self.running:
            one = self.running[which % len(self.running)]
            one.num_computed = min(len(one.tokens), one.num_computed + chunk)
            self.pages.publish(one, one.num_computed)

    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        if self.running:
            self.pages.release(self.running.pop(which % len(self.running)))

    def is_worth_waiting(self, waiting: Sequence) -> bool:
        """By all hashes of its prompt."""
        soon = 0
        for digest in readable(waiting):
            if digest in self.pages._computing:
                soon += PAGE
            elif not self.pages.pool.knows(digest):
                break
        return soon >= SHARE_WORTH_TOKENS

    def cached(self, waiting: Sequence) -> int:
        hashes = readable(waiting)
        known = [self.pages.pool.knows(digest) for digest in hashes]
        return known.index(False) if False in known else len(known)

    @invariant()
    def nothing_is_lost(self) -> None:
        check_pool(self.pages.pool)
        assert set(self.pages._computing.values()) <= set(self.running)


def readable(one: Sequence) -> list[PageHash]:
    hashes, parent = [], root_hash("", None)
    for page in range((len(one.tokens) - 1) // PAGE):
        parent = page_hash(parent, one.tokens[page * PAGE : (page + 1) * PAGE])
        hashes.append(parent)
    return hashes


TestWalks = Walks.TestCase
TestWalks.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_burst_is_hashed_no_further_than_it_can_be_read() -> None:
    """A thousand long prompts behind one that runs: a page or what is worth the wait, each."""
    pages = SequencePages(limits(num_pages=4000, page_size=PAGE))
    first = sequence([5] * 4000)
    assert pages.take(first, 0)
    alike = [sequence([5] * 4000) for _ in range(10)]
    others = [sequence([6] * 4000) for _ in range(10)]
    assert all(map(pages.is_computed_elsewhere, alike))
    assert not any(map(pages.is_computed_elsewhere, others))
    assert {len(one.hashes) for one in alike} == {kv.SHARE_WORTH_TOKENS // PAGE}
    assert {len(one.hashes) for one in others} == {1}


@settings(max_examples=200)
@given(
    shared=st.integers(0, 40),
    length=st.integers(1, 40),
    chunks=st.lists(st.integers(1, 60), max_size=6),
)
def test_a_prompt_waits_for_what_is_left_to_compute_of_another(
    shared: int, length: int, chunks: list[int]
) -> None:
    """As if all that the other will compute were known: its pages are named as it comes to them."""
    pages = SequencePages(limits(num_pages=PAGES, page_size=PAGE))
    first = sequence([5] * (40 * PAGE + 1))
    assert pages.take(first, 0)
    second = sequence([5] * (min(shared, length) * PAGE) + [6] * (length * PAGE + 1))
    for chunk in (0, *chunks):
        first.num_computed = min(len(first.tokens), first.num_computed + chunk)
        pages.publish(first, first.num_computed)
        common = sum(
            mine == other for mine, other in zip(readable(first), readable(second), strict=False)
        )
        left = common - first.num_published
        expected = left * PAGE >= SHARE_WORTH_TOKENS
        assert pages.is_computed_elsewhere(second) == expected
        assert len(pages._computing) <= SHARE_WORTH_TOKENS // PAGE


def hashed_by(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many pages."""
    count = 0

    def counted(*arguments: Any) -> PageHash:
        nonlocal count
        count += 1
        return page_hash(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("loraplex.server.engine.scheduling.sequence.page_hash", counted)
        call()
    return count


LONG = 32_768
NEXT_PAGES = SHARE_WORTH_TOKENS // PAGE


def long_harness() -> Harness:
    return Harness(
        limits(
            num_pages=3 * LONG // PAGE,
            page_size=PAGE,
            max_context=2 * LONG,
            max_step_tokens=2048,
            vocab_size=1000,
        )
    )


def pages_of_each_plan(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """That are hashed in each plan until all is done; commits hash what they publish, no more."""
    hashed = []
    plan, commit = harness.scheduler.plan, harness.scheduler.commit

    def counted_plan(now: float) -> Any:
        result: list[Any] = []
        hashed.append(hashed_by(lambda: result.append(plan(now)), monkeypatch))
        return result[0]

    def counted_commit(step: int, results: Any) -> None:
        most = harness.scheduler.limits.max_step_tokens // PAGE + len(results) * (NEXT_PAGES + 1)
        assert hashed_by(lambda: commit(step, results), monkeypatch) <= most

    monkeypatch.setattr(harness.scheduler, "plan", counted_plan)
    monkeypatch.setattr(harness.scheduler, "commit", counted_commit)
    harness.run()
    return hashed


def test_a_long_prompt_is_hashed_as_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = long_harness()
    prompt = [5 + number % 900 for number in range(LONG)]
    key = harness.submit(make_request(prompt, 2))
    assert max(pages_of_each_plan(harness, monkeypatch)) <= NEXT_PAGES + 1
    assert harness.events[key][-1].finish == "length"
    found = Sequence(0, make_request(prompt), Precedence(0, 0), LONG, None)
    hashes = [found.page_hash(PAGE, page) for page in range(LONG // PAGE)]
    assert all(map(harness.scheduler.pages.pool.knows, hashes)), "under the names that it had"


def test_a_long_prompt_that_is_cached_is_looked_up_in_parts_beside_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each plan goes on where the last one ended, and what runs has its token in each."""
    harness = long_harness()
    prompt = [5 + number % 900 for number in range(LONG)]
    harness.submit(make_request(prompt, 2))
    harness.run()
    stream = harness.submit(make_request([7, 8, 9], 100))
    harness.cycle()
    again = [harness.submit(make_request([*prompt, last], 2)) for last in (11, 12)]
    hashed = pages_of_each_plan(harness, monkeypatch)
    assert max(hashed) <= HASHED_PER_PLAN + len(again) * (NEXT_PAGES + 1)
    assert sum(hashed) >= 2 * (LONG // PAGE)
    assert [harness.events[key][0].cached_tokens for key in again] == [LONG, LONG]
    assert len(harness.tokens(stream)) == 100
    harness.assert_at_rest()


def test_a_long_prompt_that_is_alone_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to be in the way of, and no step whose end would cause another plan."""
    harness = long_harness()
    prompt = [5 + number % 900 for number in range(LONG)]
    harness.submit(make_request(prompt, 2))
    harness.run()
    again = harness.submit(make_request([*prompt, 11], 2))
    assert harness.plan() is not None
    harness.run()
    assert harness.events[again][0].cached_tokens == LONG
