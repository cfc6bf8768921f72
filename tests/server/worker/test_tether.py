"""A child dies with its parent, whatever kills the parent, and is always our own module."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240

PARENT = """
import sys, time
from loraplex.server.worker import tether
child = tether.spawn("timeit", ["-n1", "-r1", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""

PRINT_ORIGIN = """
import subprocess
from loraplex.server.worker import tether
child = tether.spawn("loraplex.server.worker.process.recovery", [], output=subprocess.PIPE)
out, _ = child.communicate(timeout=240)
print(child.returncode, out.decode())
"""


def gone(pidfd: int) -> bool:
    """Whether the process ends within the time limit."""
    return bool(select.select([pidfd], [], [], TIMEOUT_S)[0])


def test_a_child_dies_with_a_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.send_signal(signal.SIGKILL)
            assert gone(pidfd)
        finally:
            os.close(pidfd)


def test_a_folder_of_the_same_name_is_not_imported(tmp_path: Path) -> None:
    """The user's own `server` folder lies in the working directory."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise SystemExit('the wrong server')")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PRINT_ORIGIN}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert done.stdout.strip() == "0"
