"""Groups of layers with pages of their own: those behind a window are gone, or never were."""

from collections import deque
from pathlib import Path

import pytest

from loraplex.server.engine.memory.pages import GroupPages
from loraplex.server.engine.memory.room import pages_held
from loraplex.server.engine.plan import PageGrant, StepPlan
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.sampling.results import StepTicket
from loraplex.server.protocol import GenerateRequest, SamplingParams
from tests.server.model.driver import Driver, Stream, generate, step
from tests.server.model.families.parity import GREEDY
from tests.server.model.gpu_pair import prompt
from tests.server.model.hub_models import make_model, save_model

ROWS = {
    "gemma2": (None, 7, 7),
    "mistral-window": (7,),
    "llama3": (None,),
    "gemma4-inputs": (None, 7),
}


def hand_over(giver: Stream, taker: Stream) -> None:
    """What the giver has computed, as of a cached prefix: of each group the pages that the taker's
    next token sees. Its others are given back, and hold NaN."""
    limits = taker.driver.executor.limits
    taker.computed = giver.computed
    grants = []
    for group, window in enumerate(limits.page_windows):
        first = 0 if window is None else max(0, taker.computed + 1 - window) // limits.page_size
        held = giver.pages[group]
        pages = held.pages[first - held.first :]
        del held.pages[first - held.first :]
        taker.pages[group] = GroupPages(first, pages)
        grants.append(PageGrant(taker.row, first, list(pages), group))
    giver.free()
    taker.driver.run(StepPlan(0, [], [], grants, []))


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_sequence_that_begins_behind_cached_pages(name: str, chunk: int, tmp_path: Path) -> None:
    driver = Driver(save_model(make_model(name), tmp_path))
    assert driver.executor.limits.page_windows == ROWS[name]
    ids = prompt(45, 1)
    alone = Stream(driver, 0, ids, sampling=GREEDY)
    generate(driver, [alone], 9, 64)
    first, second, third = (Stream(driver, row, ids, sampling=GREEDY) for row in (1, 2, 3))
    step(driver, [(first, 40)])
    hand_over(first, second)
    generate(driver, [second, third], 9, chunk)
    assert second.output == third.output == alone.output
    for ours, theirs in zip(second.logprobs, alone.logprobs, strict=True):
        assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-4)
    driver.close()


@pytest.mark.parametrize("name", list(ROWS))
def test_no_more_pages_are_held_than_was_said(name: str, tmp_path: Path) -> None:
    driver = Driver(save_model(make_model(name), tmp_path))
    limits = driver.executor.limits
    stream = Stream(driver, 0, prompt(3, 1), sampling=GREEDY)
    while len(stream.tokens) < 70:
        step(driver, [(stream, 3)])
        most = pages_held(stream.computed, limits.page_size, limits.page_windows)
        assert sum(len(group.pages) for group in stream.pages) <= most
    held = sum(len(group.pages) for group in stream.pages)
    assert len(driver.free_pages) + held == limits.num_pages
    driver.close()


def answers(executor: TorchExecutor, prompts: list[list[int]], depth: int) -> list[list[int]]:
    """All at once, with steps planned while others are in flight."""
    scheduler = Scheduler(executor.limits, SchedulerConfig())
    for key, ids in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        request = GenerateRequest(str(key), 0, 0, None, ids, [], params, key)
        scheduler.submit(key, request, 0.0)
    found: list[list[int]] = [[] for _ in prompts]
    in_flight: deque[tuple[StepPlan, StepTicket]] = deque()
    while scheduler.num_unfinished:
        plan = scheduler.plan(0.0) if len(in_flight) < depth else None
        if plan is not None:
            in_flight.append((plan, executor.launch(plan)))
        if plan is None or len(in_flight) == depth:
            done, ticket = in_flight.popleft()
            scheduler.commit(done.step, executor.collect(ticket))
        for event in scheduler.take_events():
            assert event.event.error is None
            found[event.key] += event.event.token_ids
    for done, ticket in in_flight:
        scheduler.commit(done.step, executor.collect(ticket))
    assert scheduler.stats().free_pages == executor.limits.num_pages
    return found


@pytest.mark.parametrize(
    "name", [*list(ROWS)[:3], pytest.param("gemma4-inputs", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_cache_that_is_nearly_full_changes_no_answer(
    name: str, depth: int, tmp_path: Path
) -> None:
    """Pages go from one sequence to the next as windows leave them; prompts share a beginning."""
    folder = save_model(make_model(name), tmp_path)
    alike = prompt(30, 1)
    prompts = [alike, [*alike[:25], *prompt(9, 2)], prompt(41, 3), alike, prompt(3, 4)]
    roomy = Driver(folder)
    expected = [answers(roomy.executor, [ids], 1)[0] for ids in prompts]
    limits, pages = roomy.executor.limits, roomy.executor.limits.num_pages
    page_bytes = roomy.config.kv_memory // pages
    roomy.close()
    least = pages_held(41 + 20, limits.page_size, limits.page_windows)
    tight = Driver(folder, kv_memory=(least + 3) * page_bytes, max_step_tokens=16, max_context=61)
    assert answers(tight.executor, prompts, depth) == expected
    tight.close()
