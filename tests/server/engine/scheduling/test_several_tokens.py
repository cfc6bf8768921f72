"""A decode slice may give several tokens. What comes of them is what one token at a time gives."""

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from loraplex.server.constraints.constraint import Constraint
from loraplex.server.constraints.rules import TokenRules
from loraplex.server.engine.plan import SliceResult
from loraplex.server.engine.scheduling.events import closed_event, drawn_event
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.engine.scheduling.sequence import Precedence, Sequence
from loraplex.server.protocol import SamplingParams, TokenEvent, TokenLogprob
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.server.engine.harness import Harness, limits, make_request
from tests.server.engine.twins import TwinsMachine

WISHES = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            st.lists(st.integers(5, 9), min_size=1, max_size=6),
            st.integers(1, 30).map(lambda n: [10 + i % 7 for i in range(n)]),
        ),
        "max_tokens": st.integers(0, 40),
        "adapter": st.sampled_from([None, None, "a", "b"]),
        "salt": st.sampled_from(["", "", "tenant"]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "stop_token_ids": st.lists(st.integers(4, 99), max_size=20).map(tuple),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "bad_words": st.sampled_from([(), (), (), ((7,),)]),
        "num_accepted": st.sampled_from([0, 0, 0, 1, 5]),
    }
)


class SeveralTokensMachine(TwinsMachine):
    """The same requests with drafts and without."""

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_pages=st.sampled_from([20, 400]),
        rows=st.integers(1, 4),
        budget=st.integers(4, 20),
        eos_percent=st.sampled_from([0, 5, 30]),
        max_draft=st.integers(1, 6),
        max_decodes=st.sampled_from([4, 8, 20]),
        right_percent=st.sampled_from([0, 30, 80, 100]),
    )
    def begin(
        self,
        depth: int,
        num_pages: int,
        rows: int,
        budget: int,
        eos_percent: int,
        max_draft: int,
        max_decodes: int,
        right_percent: int,
    ) -> None:
        plain = limits(num_pages=num_pages, max_rows=rows, max_step_tokens=budget)
        drafting = msgspec.structs.replace(plain, max_decodes=max(rows, max_decodes))
        options = CertifyOptions(plain.vocab_size, plain.eos_token_ids, eos_percent)
        self.options = options
        self.keeps_pages = num_pages == 400
        self.one = Harness(plain, depth, options=options)
        self.many = Harness(
            drafting,
            depth,
            SchedulerConfig(max_draft=max_draft),
            options,
            right_percent=right_percent,
        )

    @rule(wish=WISHES)
    def submit(self, wish: dict[str, Any]) -> None:
        wish = dict(wish)
        count = min(wish.pop("num_accepted"), wish["max_tokens"])
        accepted = certified_output(
            wish["adapter"], wish["prompt"], count, self.options, wish["min_tokens"]
        )
        request = make_request(accepted_ids=accepted, **wish)
        self.submit_to_both(request)

    @invariant()
    def only_accepted_tokens_are_published(self) -> None:
        if not hasattr(self, "many"):
            return
        size = self.many.limits.page_size
        for sequence in self.many.scheduler._running:
            assert sequence.num_published * size < max(1, len(sequence.tokens))

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "many"):
            return
        if self.keeps_pages and not self.aborted:
            published = [set(h.scheduler.pages.pool._page_of) for h in (self.one, self.many)]
            assert published[0] == published[1]


SeveralTokensMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestSeveralTokens = SeveralTokensMachine.TestCase


def drafting(right_percent: int = 100, depth: int = 1, **changes: Any) -> Harness:
    engine = limits(max_decodes=12, **changes)
    config = SchedulerConfig(max_draft=3)
    return Harness(engine, depth, config, right_percent=right_percent)


def slices(harness: Harness) -> list[tuple[str, int]]:
    return [(s.kind, s.num_new) for plan in harness.plans for s in plan.slices]


def test_right_drafts_save_steps() -> None:
    harness = drafting(depth=2)
    key = harness.submit(make_request([5, 6, 7], 12))
    harness.run()
    # Pages of 4 tokens: a slice computes up to the end of the last page that the sequence has.
    lengths = [("prompt", 3), ("decode", 1), ("decode", 4), ("decode", 4), ("decode", 2)]
    assert slices(harness) == lengths
    assert [len(e.token_ids) for e in harness.events[key]] == [1, 1, 4, 4, 2]


def test_wrong_drafts_cost_nothing_but_their_tokens() -> None:
    harness = drafting(right_percent=0)
    key = harness.submit(make_request([5, 6, 7, 8], 9))
    harness.run()
    assert harness.tokens(key) == certified_output(None, [5, 6, 7, 8], 9, harness.executor.options)
    assert [len(e.token_ids) for e in harness.events[key]] == [1] * 9
    assert max(num_new for _, num_new in slices(harness)) == 4


def test_drafts_leave_a_token_of_the_budget_to_every_running_sequence() -> None:
    harness = drafting(max_step_tokens=6)
    keys = [harness.submit(make_request([5, 6 + i], 10)) for i in range(3)]
    for _ in range(2):
        harness.cycle()
    assert all(harness.tokens(key) for key in keys)
    harness.run()
    decoding = [p for p in harness.plans if all(s.kind == "decode" for s in p.slices)]
    assert all(p.num_tokens <= 6 for p in harness.plans)
    assert any(len(p.slices) == 3 and p.num_tokens > 3 for p in decoding)


def test_a_prompt_slice_of_one_token_is_no_decode_slice() -> None:
    harness = Harness(limits(max_step_tokens=4))
    harness.submit(make_request([5, 6, 7, 8, 9], 2))
    harness.submit(make_request([5], 2))
    harness.run()
    pieces = [piece for plan in harness.plans for piece in plan.slices]
    assert [[(p.kind, p.token_ids) for p in pieces if p.seq_row == row] for row in (0, 1)] == [
        [("prompt", [5, 6, 7, 8]), ("prompt", [9]), ("decode", [])],
        [("prompt", [5]), ("decode", [])],
    ]


def test_a_draft_ends_before_what_a_rule_forbids() -> None:
    whole = certified_output(None, [5, 6, 7, 8], 12, CertifyOptions(100, (2, 3)))
    harness = drafting()
    key = harness.submit(make_request([5, 6, 7, 8], 12, bad_words=((whole[5],),)))
    harness.run()
    tokens = harness.tokens(key)
    assert tokens[:5] == whole[:5]
    assert whole[5] not in tokens
    drafts = [piece.draft for plan in harness.plans for piece in plan.slices if piece.draft]
    assert max(map(len, drafts)) > 1
    assert all(whole[5] not in draft for draft in drafts)


def test_tokens_behind_a_stop_are_dropped_with_their_logprobs() -> None:
    harness = drafting()
    output = certified_output(None, [5, 6, 7, 8], 12, harness.executor.options)
    request = make_request([5, 6, 7, 8], 12, stop_token_ids=(output[2],), logprobs=0)
    key = harness.submit(request)
    harness.run()
    first, last = harness.events[key]
    assert first.token_ids == (output[0],)
    assert (last.token_ids, last.finish) == ((output[1], output[2]), "stop")
    assert last.logprobs is not None
    assert [p.token_id for p in last.logprobs] == output[1:3]
    harness.assert_at_rest()


@pytest.mark.parametrize(
    ("token_ids", "word"),
    [((), "gave 0 tokens"), ((5,) * 5, "gave 5 tokens, expected 1 to 4"), ((5, 100), "id 100")],
)
def test_a_bad_result_of_several_tokens_ends_its_sequence(
    token_ids: tuple[int, ...], word: str
) -> None:
    harness = drafting()
    key = harness.submit(make_request([5, 6, 7, 8], 20))
    harness.cycle()
    harness.executor.results[0] = SliceResult(token_ids)
    harness.run()
    assert word in str(harness.last(key).message)
    assert len(harness.tokens(key)) == 1
    harness.assert_at_rest()


class Letters:
    """A matcher of the tokens 10, 11, 12 in this order; nobody asks it for drafts."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._is_wrong = False

    def consume_token(self, sampled_token: int) -> bool:
        self._is_wrong |= sampled_token != 10 + len(self.taken)
        self.taken.append(sampled_token)
        return not self._is_wrong

    def is_error(self) -> bool:
        return self._is_wrong

    def get_error(self) -> str:
        return "out of order"

    def is_accepting(self) -> bool:
        return len(self.taken) == 3

    def is_stopped(self) -> bool:
        return not self._is_wrong and len(self.taken) == 3

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        raise AssertionError("no mask is asked for")

    def deep_copy(self) -> "Letters":
        raise NotImplementedError

    def try_consume_tokens(self, tokens: list[int]) -> int:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> bool:
        raise NotImplementedError

    def validate_tokens(self, tokens: list[int]) -> int:
        raise NotImplementedError

    def compute_ff_bytes(self) -> bytes:
        raise NotImplementedError

    def compute_ff_tokens(self) -> list[int]:
        raise NotImplementedError


def drawn(token_ids: tuple[int, ...], max_tokens: int = 9) -> tuple[list[int], list[TokenEvent]]:
    """What the matcher has taken of a result, and the result's events."""
    request = make_request([5], max_tokens)
    sequence = Sequence(1, request, Precedence(0, 1), 1 + max_tokens, None)
    matcher = Letters()
    rules = TokenRules.of(SamplingParams(), (2,), 100)
    sequence.constraint = Constraint(matcher, rules, 0)
    logprobs = tuple(TokenLogprob(token, -1.0) for token in token_ids)
    events = [drawn_event(sequence, token_ids, logprobs, (2,)).event]
    sequence.constraint.catch_up()
    if sequence.constraint.state != "open":
        events.append(closed_event(sequence, sequence.constraint).event)
    assert sequence.tokens == [5, *(t for e in events for t in e.token_ids)]
    assert all(len(e.logprobs or ()) == len(e.token_ids) for e in events)
    return matcher.taken, events


def test_a_matcher_takes_the_accepted_tokens() -> None:
    taken, events = drawn((10, 11))
    assert taken == [10, 11]
    assert [(e.token_ids, e.finish) for e in events] == [((10, 11), None)]


def test_a_matcher_that_is_done_ends_the_output() -> None:
    taken, events = drawn((10, 11, 12))
    assert taken == [10, 11, 12]
    assert [(e.token_ids, e.finish) for e in events] == [((10, 11, 12), None), ((), "stop")]


def test_a_matcher_that_refuses_a_token_ends_the_output() -> None:
    taken, events = drawn((10, 12, 12))
    assert taken == [10, 12]
    assert events[-1].error == "bad_grammar"


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "expected"),
    [((10, 2, 11), 9, ((10, 2), "stop")), ((10, 11, 12), 2, ((10, 11), "length"))],
)
def test_ends_and_max_tokens_of_constrained_sequences(
    token_ids: tuple[int, ...], max_tokens: int, expected: tuple[Any, ...]
) -> None:
    taken, (event,) = drawn(token_ids, max_tokens)
    assert taken == [t for t in event.token_ids if t != 2]
    assert (event.token_ids, event.finish) == expected


def test_rewind_never_adds_computed_tokens() -> None:
    sequence = Sequence(1, make_request([5, 6]), Precedence(0, 1), 9, None)
    sequence.num_computed = 5
    for wanted, left in [(7, 5), (3, 3), (4, 3)]:
        sequence.rewind(wanted)
        assert sequence.num_computed == left


def test_a_prompt_of_one_token_costs_what_a_decode_costs() -> None:
    harness = Harness(limits(max_step_tokens=8), step_s=lambda plan: 0.1)
    harness.submit(make_request([5], 4))
    harness.cycle()
    cost = harness.scheduler.prompts.cost
    assert (cost.decode_s, cost.prompt_s(1, 1)) == (0.1, 0)
    harness.submit(make_request([5, 6, 7], 4))
    harness.step_s = lambda plan: 0.4
    harness.cycle()
    assert cost.prompt_s(3, 4.5) == pytest.approx(0.3)
