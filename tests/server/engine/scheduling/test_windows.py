"""Groups of layers with windows: pages behind a window are given up, and found again.

The certifying executor refuses to read a page that is gone, of another group, or written anew.
"""

import pytest

from loraplex.server.engine.memory.room import pages_held
from loraplex.server.engine.plan import SliceResult
from tests.certifying.certificates import certified_output
from tests.server.engine.harness import Harness, limits, make_request

SIZE = 4
HYBRID = (None, 9)


def prompt(length: int) -> list[int]:
    return [5 + i % 9 for i in range(length)]


def held(harness: Harness) -> int:
    return harness.limits.num_pages - harness.scheduler.pages.pool.available


@pytest.mark.parametrize("windows", [(9,), HYBRID, (None, 9, 9), (None, 1, 30)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_holds_what_its_tokens_still_see(
    windows: tuple[int | None, ...], depth: int
) -> None:
    harness = Harness(limits(page_windows=windows, num_pages=99, max_step_tokens=4), depth)
    key = harness.submit(make_request(prompt(20), 40))
    most = 0
    while harness.scheduler.num_unfinished:
        harness.cycle()
        most = max(most, held(harness))
    ahead = (depth + 1) * len(windows)  # steps of a page's tokens
    assert most <= pages_held(60, SIZE, windows) + ahead
    assert harness.tokens(key) == certified_output(None, prompt(20), 40, harness.executor.options)
    harness.assert_at_rest()


@pytest.mark.parametrize("windows", [(9,), HYBRID, (None, 9, 9)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_few_pages_do_as_are_said_to(windows: tuple[int | None, ...], depth: int) -> None:
    """A prompt of several steps, which fits no step at once, and an answer to the context's end."""
    pages = pages_held(63, SIZE, windows)
    harness = Harness(limits(page_windows=windows, num_pages=pages, max_step_tokens=12), depth)
    keys = [harness.submit(make_request(prompt(50), 14)) for _ in range(2)]
    harness.run()
    expected = certified_output(None, prompt(50), 14, harness.executor.options)
    assert [harness.tokens(key) for key in keys] == [expected, expected]
    harness.assert_at_rest()
    smaller = Harness(limits(page_windows=windows, num_pages=pages - 1))
    key = smaller.submit(make_request(prompt(50), 14))
    assert smaller.last(key).error == "context_length"


def hits(harness: Harness, tokens: list[int]) -> int:
    key = harness.submit(make_request(tokens, 2))
    harness.run()
    return harness.events[key][0].cached_tokens or 0


@pytest.mark.parametrize("windows", [(9,), HYBRID, (None, 9, 14)])
def test_prompts_go_on_behind_what_is_cached(windows: tuple[int | None, ...]) -> None:
    harness = Harness(limits(page_windows=windows, num_pages=99))
    assert hits(harness, prompt(30)) == 0
    assert hits(harness, prompt(30)) == 28
    assert hits(harness, [*prompt(30), 1, 2, 3, 4, 5]) == 28
    assert hits(harness, [*prompt(17), 1]) == 16
    harness.assert_at_rest()


def test_a_prompt_begins_where_every_group_still_has_its_window() -> None:
    """Pages that were given up first are overwritten first: the first group has the whole prompt,
    the window only its end."""
    harness = Harness(limits(page_windows=HYBRID, num_pages=34))
    assert hits(harness, prompt(48)) == 0
    pool = harness.scheduler.pages.pool
    taken = pool.allocate(34 - 24 + 6)  # all free pages, and the oldest cached ones
    assert taken is not None
    pool.release(taken)
    assert hits(harness, [*prompt(17), 1]) == 0, "the window before its 17th token is gone"
    assert hits(harness, prompt(48)) == 44
    harness.assert_at_rest()


def test_a_failed_sequence_leaves_no_page_to_be_read() -> None:
    harness = Harness(limits(page_windows=HYBRID))
    key = harness.submit(make_request(prompt(30), 8))
    for _ in range(5):
        harness.cycle()
    harness.executor.results[0] = SliceResult(failed=True)
    harness.run()
    assert harness.last(key).error == "internal"
    assert hits(harness, prompt(30)) == 0
    harness.assert_at_rest()
