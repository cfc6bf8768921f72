"""No program that a test starts outlives pytest, whatever kills pytest."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.tethered import tethered

TESTS = Path(__file__).parent
TIMEOUT_S = 240
# Of programs that run on; `subprocess.run` waits for those that end by themselves.
STARTERS = ("subprocess.Popen(", "asyncio.create_subprocess_exec(")
PARENT = """
import subprocess, time
from tests.tethered import tethered
child = subprocess.Popen(tethered("sleep", "600"))
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_program_dies_with_a_killed_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=TESTS.parent, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.send_signal(signal.SIGKILL)
            assert select.select([pidfd], [], [], TIMEOUT_S)[0]
        finally:
            os.close(pidfd)


def test_a_program_keeps_its_exit_code_and_its_arguments() -> None:
    done = subprocess.run(tethered("sh", "-c", "echo $1; exit 7", "-", "a b"), capture_output=True)
    assert (done.returncode, done.stdout) == (7, b"a b\n")


def test_every_starter_uses_it() -> None:
    texts = {path: path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)}
    starters = [path for path, text in texts.items() if any(word in text for word in STARTERS)]
    assert len(starters) > 10
    loose = [p for p in starters if not re.search(r"tethered\(|tether\.spawn\(", texts[p])]
    assert loose == []
