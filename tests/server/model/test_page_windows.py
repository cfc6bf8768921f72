"""Groups of layers with pages of their own: those behind a window are gone, or never were."""

from pathlib import Path

import pytest

from server.engine.memory.pages import GroupPages
from server.engine.memory.room import pages_held
from server.engine.plan import PageGrant, StepPlan
from tests.server.model.driver import Driver, Stream, generate, step
from tests.server.model.families.parity import GREEDY
from tests.server.model.gpu_pair import prompt
from tests.server.model.hub_models import make_model, save_model

ROWS = {"gemma2": (None, 7, 7), "mistral-window": (7,), "llama3": (None,)}


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
