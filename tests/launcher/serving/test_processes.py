"""Lines of children; children that fail, die and are stopped."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.serving.processes import (
    MAX_LINE_BYTES,
    Child,
    ChildFailed,
    ChildSupervisor,
    Lines,
    Say,
    named_line,
    said_in,
)
from loraplex.server.worker import tether

TIMEOUT_S = 240

PROGRAM = """
import os, signal, sys, time
count = int(open(sys.argv[1]).read() or 0) + 1
open(sys.argv[1], "w").write(str(count))
print("life", count, flush=True)
exec(sys.argv[2])
"""


def test_lines_end_at_returns_too() -> None:
    lines = Lines()
    assert lines.feed(b"10%\r20%\rdo") == ["10%", "20%"]
    assert lines.feed(b"ne\n\n\xff\n") == ["done", "\ufffd"]
    assert lines.feed(b"x" * (MAX_LINE_BYTES + 1)) == ["x" * MAX_LINE_BYTES]


@given(st.lists(st.binary(max_size=20)))
def test_lines_do_not_depend_on_how_bytes_arrive(parts: list[bytes]) -> None:
    piecewise, whole = Lines(), Lines()
    arrived = [line for part in [*parts, b"\n"] for line in piecewise.feed(part)]
    assert arrived == whole.feed(b"".join(parts) + b"\n")


class Case:
    """A service whose children run a line of Python, with the lines that it said."""

    def __init__(self, folder: Path, code: str) -> None:
        self.counter = folder / "counter"
        self.counter.write_text("")
        self.code = code
        self.said: list[str] = []
        self.children: list[Child] = []
        self.service = ChildSupervisor("child", self.start, self.said.append)

    def start(self, on_line: Say) -> Child:
        reading, writing = os.pipe()
        # `timeit` runs a statement given as an argument: a module that every Python has.
        code = PROGRAM.replace("sys.argv[1]", repr(str(self.counter)))
        code = code.replace("sys.argv[2]", repr(self.code))
        process = tether.spawn("timeit", ["-n1", "-r1", code], output=writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self.children.append(Child(process, reading, on_line))
        return self.children[-1]

    @property
    def lives(self) -> int:
        return int(self.counter.read_text() or 0)


async def until_lives(case: Case, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if case.lives >= count:
                return
            await asyncio.sleep(0.01)  # polls a condition, bounded by the timeout


async def test_a_child_that_never_gets_ready_is_a_failure_in_its_own_words(tmp_path: Path) -> None:
    case = Case(tmp_path, "sys.stderr.write('loraplex: no such model\\n'); sys.exit(3)")
    with pytest.raises(ChildFailed, match="^no such model$"):
        await asyncio.wait_for(case.service.run(), TIMEOUT_S)
    assert case.lives == 1


async def test_a_child_that_was_ready_is_started_again_and_said_so(tmp_path: Path) -> None:
    case = Case(tmp_path, "time.sleep(600)")
    case.service.was_ready.set()
    running = asyncio.create_task(case.service.run())
    await until_lives(case, 1)
    case.children[0].signal(signal.SIGKILL)
    await until_lives(case, 2)
    assert any("SIGKILL" in line and "starting it again" in line for line in case.said)
    await case.service.stop(TIMEOUT_S)
    await asyncio.wait_for(running, TIMEOUT_S)
    assert case.lives == 2


async def test_a_child_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    case = Case(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    running = asyncio.create_task(case.service.run())
    await until_lives(case, 1)
    await case.service.stop(0.2)
    await asyncio.wait_for(running, TIMEOUT_S)
    assert case.children[0].exited.is_set()


async def test_output_is_shown_under_the_childs_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path, "sys.exit(1)")
    with pytest.raises(ChildFailed, match="exit code 1"):
        await asyncio.wait_for(case.service.run(), TIMEOUT_S)
    assert "child  | life 1\n" in capfd.readouterr().out


@pytest.mark.parametrize("is_open", [False, True])
async def test_lines_are_read_to_the_last_when_nobody_reads_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """More of them than a pipe holds."""
    lines = "b'a\\n' * (1 << 14) + b'loraplex: no such model\\n'"
    case = Case(tmp_path, f"sys.stdout.buffer.write({lines}); sys.stdout.flush(); sys.exit(3)")
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as unread:
        if not is_open:
            reader.close()
        with monkeypatch.context() as patched:
            patched.setattr("sys.stdout", unread)
            with pytest.raises(ChildFailed, match="^no such model$"):
                await asyncio.wait_for(case.service.run(), TIMEOUT_S)


def test_a_line_says_whose_it_is() -> None:
    assert named_line("router", "hello") == "router | hello"
    assert named_line("worker-0", '{"level": "info", "message": "a \\"b\\""}') == (
        '{"process": "worker-0", "level": "info", "message": "a \\"b\\""}'
    )
    assert named_line("worker-0", "{oops") == "worker-0 | {oops"


def test_in_json_what_a_child_says_otherwise_becomes_a_message() -> None:
    line = '{"level": "info", "message": "x"}'
    assert named_line("router", line, is_json=True) == named_line("router", line)
    for said in ("Traceback", '{"cut": "off', '{"message": 5', "[1]", '{"other": 1}'):
        told = json.loads(named_line("engine", said, is_json=True))
        assert (told["process"], told["message"]) == ("engine", said)
    assert said_in(named_line("router", "hello", is_json=True)) == "hello"
    assert said_in("hello") == "hello"
