"""A part of the fuzzer's mutants, in a process with little memory."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = 1000


def test_every_mutant_is_judged() -> None:
    command = [sys.executable, "-m", "tests.adapters.fuzz", "--count", str(COUNT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    judged, accepted = map(int, re.findall(r"\d+", done.stdout.splitlines()[0]))
    assert judged == COUNT
    # They reach all parts of the judgement, and most of them are refused.
    assert 0 < accepted < COUNT / 4
    assert len(done.stdout.splitlines()) > 25
