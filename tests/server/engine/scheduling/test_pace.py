"""When the next step is planned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.scheduling.pace import SHORT_S, Pace

SECONDS = st.floats(0.0, 10.0)


@pytest.mark.parametrize(
    ("likely_s", "spare_s"),
    [
        (0.0, 0.0),  # nothing is known
        (0.005, 0.0),  # short
        (0.020, 0.015),
        (0.060, 0.045),
    ],
)
def test_spare_time(likely_s: float, spare_s: float) -> None:
    assert Pace().spare_s(likely_s) == pytest.approx(spare_s)


def test_the_host_gets_the_time_that_it_took_of_late() -> None:
    pace = Pace()
    pace.prepared(0.002, 0.001)
    assert pace.spare_s(0.1) == pytest.approx(0.072)
    pace.prepared(0.001, 0.200)  # the device began long before
    assert pace.spare_s(0.1) == pytest.approx(0.069)
    for _ in range(100):
        pace.prepared(0.001, 0.001)
    assert pace.spare_s(0.1) == pytest.approx(0.073)


@given(st.lists(st.tuples(SECONDS, SECONDS)), SECONDS)
def test_no_step_is_waited_for_to_its_likely_end(
    steps: list[tuple[float, float]], likely_s: float
) -> None:
    pace = Pace()
    for plan_s, launch_s in steps:
        pace.prepared(plan_s, launch_s)
    assert 0 <= pace.spare_s(likely_s) <= 0.75 * likely_s
    assert likely_s >= SHORT_S or not pace.spare_s(likely_s)
