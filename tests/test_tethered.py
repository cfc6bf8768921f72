"""No program that a test starts outlives pytest, whatever kills pytest."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_every_starter_uses_it(path: Path) -> None:
    text = path.read_text()
    if path != Path(__file__) and any(starter in text for starter in STARTERS):
        assert "tethered(" in text or "tether.spawn(" in text
