"""How much of steps, and of the device's time, prompts take beside streams of others."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.engine.plan import StepPlan
from loraplex.server.engine.scheduling.prompt_shares import LEAST_TOKENS, TURN_TOKENS
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.engine.scheduling.sequence import Sequence, State
from loraplex.server.protocol import BACKGROUND_PRIORITY
from tests.server.engine.harness import Harness, limits, make_request

DECODE_S = 0.005


def prompts_of(plan: StepPlan) -> dict[int, int]:
    """Tokens of prompts by row."""
    return {s.seq_row: s.num_new for s in plan.slices if s.kind == "prompt" and s.num_new > 1}


def device(token_s: float = 50e-6, context: float = 2e-5) -> Callable[[StepPlan], float]:
    """A made-up one. context: what a token of context costs, as a part of a token."""

    def step_s(plan: StepPlan) -> float:
        of = [s for s in plan.slices if s.kind == "prompt"]
        work = sum(s.num_new * (1 + context * (s.start + s.num_new / 2)) for s in of)
        return DECODE_S + token_s * work

    return step_s


class Scene(Harness):
    """Tokens are never an end. All prompts differ."""

    def __init__(
        self, token_s: float = 50e-6, depth: int = 2, num_pages: int = 600, **config: float
    ) -> None:
        sizes = limits(
            num_pages=num_pages, page_size=64, max_rows=16, max_step_tokens=2048, max_context=20_000
        )
        bounds: Any = config
        super().__init__(sizes, depth, SchedulerConfig(**bounds), step_s=device(token_s))

    def ask(self, tenant: str, prompt: int, output: int, **changes: Any) -> int:
        ids = [5 + self.keys % 90] * prompt
        return self.submit(
            make_request(
                ids, output, tenant=tenant, ignore_eos=True, salt=str(self.keys), **changes
            )
        )

    def streams(self, tenant: str, count: int, **changes: Any) -> list[int]:
        """They have begun, and what steps take has been learned."""
        keys = [self.ask(tenant, 300, 4000, **changes) for _ in range(count)]
        while not all(self.tokens(key)[5:] for key in keys):
            self.cycle()
        return keys

    def until(self, *keys: int) -> list[StepPlan]:
        """The plans until each has a token."""
        first = len(self.plans)
        for _ in range(2000):
            if all(self.tokens(key) for key in keys):
                return self.plans[first:]
            self.cycle()
        raise AssertionError("a prompt starves")

    def seconds(self, plans: list[StepPlan]) -> list[float]:
        assert self.step_s is not None
        return [self.step_s(plan) for plan in plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_beside_streams_of_its_own_tenant_a_prompt_takes_what_the_target_leaves(
    depth: int,
) -> None:
    scene = Scene(depth=depth)
    scene.streams("a", 3)
    plans = scene.until(scene.ask("a", 8000, 1))
    with_prompt = [plan for plan in plans if prompts_of(plan)]
    assert len(with_prompt) >= len(plans) - depth, "no step stands back from its own streams"
    assert all(len(plan.slices) == 4 for plan in with_prompt), "a stream waits"
    times = scene.seconds(with_prompt)
    assert max(times) <= 1.1 * 0.06
    assert min(times[2:-1]) >= 0.8 * 0.06, "the steps are too small"
    # Steps whose prompt is cut are as long as captured ones.
    assert {plan.num_tokens % 128 for plan in with_prompt[:-1]} == {0}


def test_a_prompt_alone_has_whole_steps() -> None:
    scene = Scene()
    scene.streams("a", 1)
    scene.abort(1)
    plans = scene.until(scene.ask("b", 8000, 1))
    assert [*map(sum, (prompts_of(p).values() for p in plans if prompts_of(p)))][:3] == [2048] * 3


def test_a_prompt_alone_beside_prompts_and_batches_has_whole_steps() -> None:
    scene = Scene()
    scene.streams("a", 1, priority=BACKGROUND_PRIORITY)
    plans = scene.until(*(scene.ask(tenant, 3000, 1) for tenant in "ab"))
    sizes = [sum(prompts_of(plan).values()) for plan in plans if prompts_of(plan)]
    assert sizes[:2] == [2047] * 2, "one token is the batch's"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("count", "size"), [(3, 18_000), (16, 2000)])
def test_prompts_of_a_tenant_do_not_stand_before_one_of_another(
    depth: int, count: int, size: int
) -> None:
    """Nothing streams. The prompts are longer than a turn, or shorter than a step."""
    scene = Scene(depth=depth, num_pages=1000)
    many = [scene.ask("a", size, 1) for _ in range(count)]
    for _ in range(3):
        scene.cycle()
    plans = scene.until(scene.ask("b", 10, 1))
    assert sum(sum(prompts_of(plan).values()) for plan in plans) < TURN_TOKENS
    scene.cycle()
    assert not all(scene.tokens(key) for key in many)
    assert len(scene.until(scene.ask("c", 10, 1))) <= depth + 1, "the turn is over"
    scene.until(*many)


def test_a_plan_tries_what_waits_once_for_all_running_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(num_pages=2000, depth=1)
    scene.streams("a", 2)
    for tenant in "bcdef":
        scene.ask(tenant, 12_000, 1)
        scene.cycle()
    for tenant in "ghij":
        scene.ask(tenant, 3000, 1)
    asked: list[int] = []
    most = scene.scheduler.prompts.most

    def counted(sequence: Sequence, tokens: int) -> int:
        if sequence.state is State.WAITING:
            asked.append(sequence.key)
        return most(sequence, tokens)

    monkeypatch.setattr(scene.scheduler.prompts, "most", counted)
    for _ in range(20):
        asked.clear()
        scene.cycle()
        assert len(asked) == len(set(asked))


def test_long_prompts_of_tenants_take_turns() -> None:
    scene = Scene(num_pages=2000)
    keys = [scene.ask(tenant, 18_000, 1) for tenant in "aabc"]
    rows = [next(iter(prompts_of(plan)), None) for plan in scene.until(*keys)]
    for _ in range(2):
        turns, rows = rows[:12], rows[12:]
        assert [turns.count(row) for row in dict.fromkeys(turns)] == [4, 4, 4]


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_of_a_tenant_have_a_share_beside_streams_of_others(
    share: float, depth: int
) -> None:
    scene = Scene(depth=depth, prompt_share=share)
    scene.streams("a", 2)
    scene.streams("b", 1)
    plans = scene.until(scene.ask("b", 8000, 1), scene.ask("b", 8000, 1))
    times, whole = scene.seconds(plans), sum(scene.seconds(plans))
    of_prompts = sum(times) - DECODE_S * len(plans)
    assert 0.85 * share * whole <= of_prompts <= 1.03 * share * whole + 0.06
    assert all(len(plan.slices) >= 3 for plan in plans), "a stream waits"
    assert max(times) <= 1.1 * 0.06
    if share <= 0.5:  # never two in a row
        assert not any(prompts_of(one) and prompts_of(two) for one, two in pairwise(plans[:-2]))


def test_who_waits_behind_a_tenant_that_stands_back_goes_first() -> None:
    scene = Scene()
    scene.streams("a", 2)
    long = [scene.ask("b", 8000, 1) for _ in range(2)]
    scene.cycle()
    short = scene.ask("c", 400, 1)
    plans = scene.until(short)
    assert len(plans) <= 4
    assert not any(scene.tokens(key) for key in long)
    scene.until(*long)


def test_a_step_with_prompts_takes_a_few_tokens_however_long_they_take() -> None:
    scene = Scene(token_s=0.01)
    scene.streams("a", 1)
    plans = scene.until(scene.ask("a", 2000, 1))
    sizes = [*filter(None, (sum(prompts_of(plan).values()) for plan in plans))]
    assert set(sizes[:-1]) == {LEAST_TOKENS}


def test_prompts_of_batches_have_a_share_beside_others() -> None:
    scene = Scene(batch_share=0.25)
    scene.streams("a", 2)
    plans = scene.until(*(scene.ask(t, 3000, 1, priority=BACKGROUND_PRIORITY) for t in "ab"))
    whole = sum(scene.seconds(plans))
    of_prompts = whole - DECODE_S * len(plans)
    assert 0.85 * 0.25 * whole <= of_prompts <= 1.03 * 0.25 * whole + 0.06
    assert max(scene.seconds(plans)) <= 1.1 * 0.06


def test_prompts_of_others_neither_wait_for_a_batch_nor_starve_it() -> None:
    scene = Scene(batch_share=0.25)
    scene.streams("a", 1)
    batch = scene.ask("b", 3000, 1, priority=BACKGROUND_PRIORITY)
    row = None
    while not scene.tokens(batch):
        scene.ask("a", 700, 1)
        scene.cycle()
        start = next((r for r in scene.plans[-1].new_rows if r.prompt_len == 3000), None)
        row = start.seq_row if start else row
        found = prompts_of(scene.plans[-1])
        of_batch = found.pop(row, 0) if row is not None else 0
        assert not found or of_batch <= LEAST_TOKENS
        assert len(scene.plans) < 300, "the batch starves"


@pytest.mark.parametrize("depth", [1, 2])
def test_who_stands_back_goes_on_once_nobody_else_is_there(depth: int) -> None:
    scene = Scene(depth=depth, prompt_share=0.01)
    (stream,) = scene.streams("a", 1)
    long = scene.ask("b", 8000, 1)
    while not any(map(prompts_of, scene.plans[-1:])):
        scene.cycle()
    scene.abort(stream)
    plans = scene.until(long)
    assert len(plans) <= 8


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_does_not_stand_back_for_who_waits_for_its_pages(depth: int) -> None:
    scene = Scene(depth=depth, num_pages=80)
    scene.abort(*scene.streams("a", 1))
    batch = scene.ask("b", 4000, 1, priority=BACKGROUND_PRIORITY)
    scene.cycle()
    waiting = scene.ask("a", 4000, 1)
    plans = scene.until(batch)
    assert not scene.tokens(waiting)
    assert max(scene.seconds(plans)) <= 1.1 * 0.06, "who comes meanwhile waits for a long step"
    scene.until(waiting)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([1, 2, 40, 700, 3000]),
            st.sampled_from([1, 3, 60]),
            st.sampled_from([0, 0, 0, BACKGROUND_PRIORITY]),
            st.integers(0, 8),
        ),
        max_size=12,
    ),
    st.floats(1e-6, 1e-2),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.sampled_from([1, 2]),
)
def test_all_prompts_come_to_their_end(
    asked: list[tuple[str, int, int, int, int]], token_s: float, share: float, depth: int
) -> None:
    scene = Scene(token_s, depth, prompt_share=share, batch_share=share)
    for tenant, prompt, output, priority, cycles in asked:
        scene.ask(tenant, prompt, output, priority=priority)
        for _ in range(cycles):
            scene.cycle()
    scene.run(5000)
    scene.assert_at_rest()
