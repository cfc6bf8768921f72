"""Constrained sequences with drafts and without, with masks in time and late: every event says the
same."""

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from tests.certifying.certificates import CertifyOptions
from tests.grids import beyond
from tests.server.constraints.grammar_harness import GrammarHarness, KnownAnswers, answer_alone
from tests.server.constraints.grammars import GRAMMARS
from tests.server.constraints.serving import EOS, VOCAB, tokens
from tests.server.engine.harness import limits, make_request
from tests.server.engine.twins import TwinsMachine

WISHES = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(0, 40),
        "adapter": st.sampled_from([None, None, "a", "b"]),
        "grammar": st.sampled_from(["", "", *GRAMMARS.values()]),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "stop_token_ids": st.sampled_from([(), (), tuple(tokens("ae1"))]),
        "bad_words": st.sampled_from([(), (), (), (tuple(tokens("no")), (7, 17))]),
        "allowed_token_ids": st.sampled_from([(), (), (), tuple(range(1, VOCAB, 2))]),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "choice": st.integers(0, 2),
    }
)


class ConstrainedDraftsMachine(TwinsMachine):
    many: GrammarHarness

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_pages=st.sampled_from([20, 400]),
        rows=st.integers(1, 4),
        budget=st.integers(4, 20),
        max_draft=st.integers(1, 8),
        max_decodes=st.sampled_from([4, 8, 20]),
        right_percent=st.sampled_from([0, 50, 90, 100]),
    )
    def begin(
        self,
        depth: int,
        num_pages: int,
        rows: int,
        budget: int,
        max_draft: int,
        max_decodes: int,
        right_percent: int,
    ) -> None:
        sizes: dict[str, Any] = {"num_pages": num_pages, "max_step_tokens": budget}
        self.plain = limits(**sizes, max_rows=rows, vocab_size=VOCAB, eos_token_ids=EOS)
        self.options = CertifyOptions(VOCAB, EOS, 5)
        drafting = msgspec.structs.replace(self.plain, max_decodes=max(rows, max_decodes))
        self.one = GrammarHarness(self.plain, depth, options=self.options)
        config = SchedulerConfig(max_draft=max_draft)
        self.many = GrammarHarness(drafting, depth, config, self.options)
        self.known = KnownAnswers(right_percent)
        self.many.know(self.known)

    @rule(late_percent=st.sampled_from([0, 30, 80]), has_costly=st.booleans())
    def slow_down(self, late_percent: int, has_costly: bool) -> None:
        self.many.late_percent, self.many.has_costly = late_percent, has_costly

    @rule(wish=WISHES, resumed=st.sampled_from([0, 0, 0, 3, 9]))
    def submit(self, wish: dict[str, Any], resumed: int) -> None:
        prompt = [300 + len(self.keys), 6, 7]
        request = make_request(prompt, **wish)
        whole = answer_alone(request, self.plain, self.options)
        self.known.known[tuple(prompt)] = whole
        request = msgspec.structs.replace(request, accepted_ids=whole[:resumed])
        self.submit_to_both(request)


@pytest.mark.parametrize("count", beyond(1, [20, 60]))
def test_constrained_drafts(count: int) -> None:
    run_state_machine_as_test(
        ConstrainedDraftsMachine, settings=settings(max_examples=count, stateful_step_count=16)
    )


def drafting(depth: int, right_percent: int, **changes: Any) -> GrammarHarness:
    engine = limits(
        **{
            "vocab_size": VOCAB,
            "eos_token_ids": EOS,
            "max_decodes": 20,
            "num_pages": 400,
            **changes,
        }
    )
    options = CertifyOptions(VOCAB, EOS, 0)
    harness = GrammarHarness(engine, depth, SchedulerConfig(max_draft=8), options)
    harness.know(KnownAnswers(right_percent))
    return harness


@pytest.mark.parametrize("depth", [1, 2])
def test_right_drafts_save_steps(depth: int) -> None:
    harness = drafting(depth, 100)
    request = make_request([5, 6, 7], 60, grammar=GRAMMARS["some tool"])
    whole = answer_alone(request, harness.limits, harness.executor.options)
    known = KnownAnswers(100)
    known.known[5, 6, 7] = whole
    harness.know(known)
    key = harness.submit(request)
    harness.run()
    assert harness.tokens(key) == whole
    assert len(harness.plans) < len(whole) / 2
    stats = harness.scheduler.stats()
    assert stats.accepted_draft_tokens > len(whole) / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_grammar_forces_is_drafted_without_any_text(depth: int) -> None:
    """The executor draws the shortest token of forced text or the longest, as it happens."""
    harness = drafting(depth, 100)
    allowed = tuple({*tokens("xy"), *tokens("one two three, four five six.")})
    grammar = 'start: ("x" | "y") "one two three, four five six."'
    key = harness.submit(make_request([5, 6], 60, grammar=grammar, allowed_token_ids=allowed))
    harness.run()
    drafts = [piece.draft for plan in harness.plans for piece in plan.slices if piece.draft]
    assert drafts
    assert harness.last(key).finish == "stop"
    assert len(harness.plans) < len(harness.tokens(key))


def test_without_drafts_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, request in (({"max_decodes": 0}, {}), ({}, {"drafts": None})):
        harness = drafting(2, 100, **changes)
        monkeypatch.setattr(harness, "_foresee", lambda: None)
        harness.submit(make_request([5, 6], 30, grammar=GRAMMARS["json"], **request))
        while harness.cycle():
            assert not harness.scheduler.drafting.take_wishes()
        assert all(not piece.draft for plan in harness.plans for piece in plan.slices)


@pytest.mark.parametrize(("depth", "has_states"), [(1, False), (2, False), (2, True)])
def test_rows_without_a_grammar_go_on_while_masks_are_late(depth: int, has_states: bool) -> None:
    """Their steps are those that they have alone; the others get their tokens later. With states
    these begin again: a state has taken the token that waited for its mask."""
    engine = limits(vocab_size=VOCAB, eos_token_ids=EOS, num_pages=400, has_states=has_states)
    options = CertifyOptions(VOCAB, EOS, 0)
    alone, beside = (GrammarHarness(engine, depth, options=options) for _ in range(2))
    for harness in (alone, beside):
        harness.submit(make_request([5, 6], 30))
    beside.late_percent, beside.has_costly = 100, True
    request = make_request([7, 8], 12, grammar="start: /[a-z]{40}/")
    bound = [beside.submit(request) for _ in range(3)]
    cycles = dict.fromkeys((alone, beside), 0)
    for harness in cycles:
        while not harness.events.get(1) or harness.last(1).finish is None:
            harness.cycle()
            cycles[harness] += 1
    assert cycles[beside] == cycles[alone]
    beside.run()
    whole = answer_alone(request, engine, options)
    assert [beside.tokens(key) for key in bound] == [whole] * 3
    assert (beside.scheduler.stats().preemptions > 0) == has_states
    beside.assert_at_rest()
