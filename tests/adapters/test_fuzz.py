"""A part of the fuzzer's mutants, in a process with little memory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids import beyond

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", beyond(1, [300, 1000]))
def test_every_mutant_is_judged(count: int) -> None:
    command = [sys.executable, "-m", "tests.adapters.fuzz", "--count", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    judged, accepted = map(int, re.findall(r"\d+", done.stdout.splitlines()[0]))
    assert judged == count
    # They reach all parts of the judgement, and most of them are refused.
    assert 0 < accepted < count / 4
    assert len(done.stdout.splitlines()) > 25
