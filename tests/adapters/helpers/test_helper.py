"""Children that are lost: what that says about a question, and what it does not."""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters.helpers.helper import (
    Helper,
    HelperBroken,
    HelperStopped,
    HelperUnavailable,
    start_problem,
)

MODULE = "tests.adapters.helpers.asked"
# What shows that a helper hangs lasts so long; all else is over long before.
SHORT_S = 4.0


@pytest.fixture
def helper() -> Iterator[Helper]:
    helper = Helper(MODULE, b"so ", 240.0, 1 << 20)
    yield helper
    helper.stop()


def pid(helper: Helper) -> int:
    """Of its process, started if there is none."""
    assert helper.problem() is None
    assert helper._process is not None
    return helper._process.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGPROF, signal.SIGABRT])
def test_one_that_died_idle_says_nothing(helper: Helper, number: int) -> None:
    before = pid(helper)
    os.kill(before, number)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody knows
    assert helper.ask(b"echo") == b"so echo"
    assert pid(helper) != before


@pytest.mark.parametrize("act", ["SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV", "babble"])
def test_one_that_died_once_is_replaced_and_asked_again(
    helper: Helper, act: str, tmp_path: Path
) -> None:
    question = f"{act} {tmp_path / 'done'}".encode()
    assert helper.ask(question) == b"so " + question


@pytest.mark.parametrize("act", ["SIGKILL", "SIGTERM", "babble"])
def test_two_deaths_are_no_verdict(helper: Helper, act: str) -> None:
    with pytest.raises(HelperUnavailable, match="lost"):
        helper.ask(act.encode())
    assert helper.ask(b"echo") == b"so echo"


@pytest.mark.parametrize("act", ["spin", "exhaust", "SIGSEGV", "SIGABRT"])
def test_its_own_limits_are_a_verdict(helper: Helper, act: str) -> None:
    with pytest.raises(HelperStopped):
        helper.ask(act.encode())
    assert helper.ask(b"echo") == b"so echo"


def test_one_that_hangs_is_replaced(tmp_path: Path) -> None:
    helper = Helper(MODULE, b"", SHORT_S, 1 << 20)
    question = f"SIGSTOP {tmp_path / 'done'}".encode()
    assert helper.ask(question) == question
    helper.stop()


def test_one_that_does_not_read_is_replaced(tmp_path: Path) -> None:
    helper = Helper(MODULE, b"", SHORT_S, 1 << 21)
    stopped = pid(helper)
    os.kill(stopped, signal.SIGSTOP)
    question = f"echo {tmp_path}/".encode() + b"/" * 200_000  # more than a pipe holds
    assert helper.ask(question) == question
    assert pid(helper) != stopped
    helper.stop()


def test_a_stop_is_heard_at_once(helper: Helper) -> None:
    heard: list[Exception] = []
    pid(helper)

    def ask() -> None:
        try:
            helper.ask(b"SIGSTOP")
        except HelperUnavailable as error:
            heard.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not helper._asking.locked():
        pass
    helper.stop()
    asking.join(240)
    assert [str(error) for error in heard] == [f"{MODULE} was stopped"]


def test_one_that_cannot_start_says_why() -> None:
    for module in ("nowhere.to_be_found", "needs_what_is_missing"):
        helper = Helper(module, b"x" * 200_000, 240.0, 1 << 20)
        with pytest.raises(HelperBroken, match=f"No module named '{module.split('.')[0]}'"):
            helper.ask(b"echo")
        assert "No module named" in str(start_problem(module))


def test_a_machine_without_processes_is_no_broken_one(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", none_left)
        with pytest.raises(HelperUnavailable) as caught:
            helper.ask(b"echo")
        assert not isinstance(caught.value, HelperBroken)
    assert helper.ask(b"echo") == b"so echo"


def test_packages_that_come_by_path_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `pip --target` and PYTHONPATH: an isolated interpreter would not find them."""
    (tmp_path / "by_path.py").write_text(f"from {MODULE} import main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = Helper("by_path", b"", 240.0, 1 << 20)
    assert helper.ask(b"echo") == b"echo"
    helper.stop()


def test_the_environment_stays_outside(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_SECRET", "secret")
    environment = Path(f"/proc/{pid(helper)}/environ").read_bytes()
    assert b"secret" not in environment


def test_a_process_with_many_files(helper: Helper) -> None:
    """`select` takes no file above the 1,024th."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[1] > 1200, "this machine allows too few files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), before[1]))
    held: list[int] = []
    try:
        while not held or held[-1] < 1100:
            held.append(os.dup(0))
        assert helper.ask(b"echo") == b"so echo"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_helpers_end_with_their_parent() -> None:
    program = (
        "from loraplex.adapters.helpers.helper import Helper; import os; "
        f"helper = Helper({MODULE!r}, b'', 240.0, 1024); helper.problem(); "
        "print(helper._process.pid, flush=True); os._exit(0)"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, check=True
    )
    with contextlib.suppress(ProcessLookupError):  # gone already
        orphan = os.pidfd_open(int(done.stdout))
        assert select.select([orphan], [], [], 240)[0]
        os.close(orphan)
