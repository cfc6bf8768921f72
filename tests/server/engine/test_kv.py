"""Whose prompt is worth waiting for, and what is found cached: as if every page had been hashed."""

from collections.abc import Sequence as Tokens

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from server.engine import kv
from server.engine.kv import SHARE_WORTH_TOKENS, SequencePages
from server.engine.pages import PageHash, page_hash, root_hash
from server.engine.sequence import Order, Sequence
from tests.server.engine.harness import make_request

PAGE = 4
PAGES = 120


def sequence(tokens: Tokens[int]) -> Sequence:
    return Sequence(0, make_request(list(tokens)), Order(0, 0), len(tokens) + 4, None)


class Walks(RuleBasedStateMachine):
    """Prompts of few kinds of pages, so that they share beginnings of all lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = SequencePages(PAGES, PAGE)
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
        self.pages.pool.check_invariants()
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
    pages = SequencePages(4000, PAGE)
    first = sequence([5] * 4000)
    assert pages.take(first, 0)
    alike = [sequence([5] * 4000) for _ in range(10)]
    others = [sequence([6] * 4000) for _ in range(10)]
    assert all(map(pages.is_computed_elsewhere, alike))
    assert not any(map(pages.is_computed_elsewhere, others))
    assert {len(one.hashes) for one in alike} == {kv.SHARE_WORTH_TOKENS // PAGE}
    assert {len(one.hashes) for one in others} == {1}
