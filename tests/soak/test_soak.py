"""A short soak, and the judgement of weights."""

from pathlib import Path

import pytest

from tests.soak.rounds import Round, growing, run

MIB = 1 << 20


@pytest.mark.parametrize(
    ("before", "after", "grows"),
    [(60, 60, False), (60, 67, False), (60, 69, True), (1000, 1040, False), (1000, 1060, True)],
)
def test_a_process_that_grows_is_named(before: int, after: int, grows: bool) -> None:
    found = growing({"router-0": [MIB, before * MIB, after * MIB]}, 10**6)
    assert bool(found) is grows
    assert all("router-0" in line for line in found)


def test_engines_may_keep_tokens_for_drafts() -> None:
    means = {"worker-0's engine": [MIB, 60 * MIB, 80 * MIB]}
    assert not growing(means, 10**6)
    assert growing(means, 10**4)


@pytest.mark.exhaustive
async def test_everything_at_once_gives_no_wrong_token(tmp_path: Path) -> None:
    outcome = await run(Round(seed=7, tokens=150_000, clients=32), tmp_path)
    assert not outcome.problems()
    kinds = {"batch_line", "whole_rolled", "whole_shaped", "stream_seen", "whole_seen"}
    assert kinds <= outcome.tally.kinds.keys()
    assert outcome.tally.tokens >= 150_000
    assert outcome.weights
