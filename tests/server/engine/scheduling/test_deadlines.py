"""The next deadline, whoever has ended meanwhile."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.scheduling.waits import Deadlines
from tests.server.engine.harness import Harness, make_request


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60))
def test_it_is_the_earliest_of_those_that_are_not_over(steps: list[tuple[int, int, bool]]) -> None:
    deadlines, model = Deadlines(), dict[int, float]()
    for key, deadline, comes in steps:
        if comes and key not in model:
            model[key] = deadline
            deadlines.add(key, deadline)
        elif not comes:
            model.pop(key, None)
            deadlines.discard(key)
        expected = min(((at, key) for key, at in model.items()), default=None)
        assert deadlines.next() == expected


def test_what_has_ended_is_not_kept_for_long() -> None:
    """Behind one that waits for hours, thousands come and go long before their deadlines."""
    harness = Harness()
    harness.submit(make_request([5], 60, deadline_s=3600.0))
    for _ in range(3000):
        harness.abort(harness.submit(make_request([5], 4, deadline_s=3600.0)))
    assert harness.scheduler.next_deadline() == 3600.0
    assert len(harness.scheduler._deadlines._heap) <= 1003
