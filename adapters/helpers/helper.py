"""Processes that answer questions, and how much the loss of one says about its question.

Only a process that ran into a limit of its own has judged the question. One that anybody else
ended, as the kernel does when memory is short, is replaced and the question is asked once more.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from loraplex.adapters.helpers.answering import HEAD_BYTES, OUT_OF_MEMORY, framed

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
# What cannot start is not started again for so long: the reason seldom goes away.
_BROKEN_S = 10.0
_DYING_S = 10.0
_MAX_WORDS = 300
_ASKED, _STARTS = 2, 4  # at most, for one question
_LIMITS = (-signal.SIGPROF, OUT_OF_MEMORY)
# How a process ends through its own doing: a full stack, memory that native code lacks. One that
# ends so each time has judged the question, too.
_CRASHES = {
    -number
    for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
}
_ROOT = str(Path(__file__).parents[3])
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from importlib import import_module; import_module(sys.argv[1]).main()"
)


class HelperStopped(Exception):
    """The question took the process beyond a limit."""


class HelperUnavailable(Exception):
    """No process can answer now; another time one may."""


class HelperBroken(HelperUnavailable):
    """No such process can be started on this machine; str() says why."""


class Helper:
    """One process, started when first needed and again after it was lost. For any thread.

    module: its `main` calls `answer_questions`. begin: what it reads first. timeout_s: of an
    answer, after which the process is lost. max_bytes: of an answer.
    """

    def __init__(self, module: str, begin: bytes, timeout_s: float, max_bytes: int) -> None:
        self._module = module
        self._begin = begin
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()
        self._changing = threading.Lock()
        self._stops = 0
        self._broken: tuple[float, str] | None = None

    def ask(self, question: bytes) -> bytes:
        """The answer. Raises HelperStopped, HelperUnavailable, HelperBroken."""
        with self._asking:
            return self._ask(question, self._stops)

    def stop(self) -> None:
        """End the process. Whoever waits for its answer hears HelperUnavailable."""
        with self._changing:
            self._stops += 1
            if self._process is not None:
                self._process.kill()
        with self._asking:
            self._lose(TimeoutError())

    def problem(self) -> str | None:
        """Why it cannot be started now, if so."""
        with self._asking:
            try:
                self._living(self._stops)
            except (OSError, EOFError, ValueError, HelperUnavailable) as error:
                self._lose(TimeoutError())
                return str(error) or "it ended while it started"
        return None

    def _ask(self, question: bytes, stops: int) -> bytes:
        """Asks the process, and starts another one when it ends before the answer. stops: how often
        it had been stopped when the question came.
        """
        ends: list[int | None] = []  # of processes that knew the question
        for _ in range(_STARTS):
            process = None
            try:
                process = self._living(stops)
                return self._exchange(process, question, self._timeout_s)
            except (OSError, EOFError, ValueError) as error:
                end = self._lose(error)
            if self._stops != stops:
                raise HelperUnavailable(f"{self._module} was stopped")
            if process is not None:
                ends.append(end)
                if end in _LIMITS or (len(ends) == _ASKED and _CRASHES.issuperset(ends)):
                    raise HelperStopped
            log.warning("the helper %s was lost: it ended with %s", self._module, end)
            if len(ends) == _ASKED:
                break
        raise HelperUnavailable(f"{self._module} was lost")

    def _living(self, stops: int) -> subprocess.Popen[bytes]:
        """The running process, started if need be. Raises HelperBroken, and as `_exchange`."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._lose(TimeoutError())
        if self._broken is not None and time.monotonic() < self._broken[0]:
            raise HelperBroken(self._broken[1])
        process = self._start()
        with self._changing:
            self._process = process
            if self._stops != stops:
                process.kill()
        try:
            self._exchange(process, self._begin, START_TIMEOUT_S)
        except (EOFError, BrokenPipeError) as error:
            assert process.stderr is not None
            words = os.read(process.stderr.fileno(), 1 << 16).decode(errors="replace")
            if (self._lose(error) or 0) > 0:  # it said why, and left
                raise self._breaks(words.strip().rpartition("\n")[2]) from error
            raise
        assert process.stderr is not None
        process.stderr.close()
        self._broken = None
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts the process: no environment, no home, but this process' packages."""
        paths = [os.path.abspath(path) for path in sys.path]
        if _ROOT not in paths:
            paths.append(_ROOT)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, self._module, *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
            )
        except (FileNotFoundError, PermissionError) as error:
            raise self._breaks(str(error)) from error
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _breaks(self, why: str) -> HelperBroken:
        why = why[:_MAX_WORDS] or "it said nothing"
        self._broken = (time.monotonic() + _BROKEN_S, why)
        log.error("the helper %s cannot be started: %s", self._module, why)
        return HelperBroken(why)

    def _lose(self, error: Exception) -> int | None:
        """Drops the lost process, and gives its exit status. error: how its loss was noticed."""
        process = self._process
        if process is None:
            return None
        try:
            code = process.wait(_DYING_S if isinstance(error, EOFError | BrokenPipeError) else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        with self._changing:
            self._process = None
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return code

    def _exchange(self, process: subprocess.Popen[bytes], frame: bytes, limit_s: float) -> bytes:
        """Sends a frame to the process and reads its answer. Raises OSError, EOFError, ValueError
        (among them a TimeoutError).
        """
        assert process.stdin is not None
        assert process.stdout is not None
        until = time.monotonic() + limit_s
        rest = memoryview(framed(frame))
        while rest:
            _wait(process.stdin, select.POLLOUT, until)
            rest = rest[os.write(process.stdin.fileno(), rest) :]
        size = int.from_bytes(_read(process.stdout, HEAD_BYTES, until), "big")
        if size > self._max_bytes:
            raise ValueError(f"a frame of {size} bytes")
        return _read(process.stdout, size, until)


def start_problem(module: str) -> str | None:
    """Why helpers of this module cannot be started on this machine, if so; the log says it, too.
    Starts one, and ends it, in about a tenth of a second."""
    helper = Helper(module, b"", START_TIMEOUT_S, 0)
    try:
        return helper.problem()
    finally:
        helper.stop()


def _read(pipe: IO[bytes], size: int, until: float) -> bytes:
    pieces = []
    while size:
        _wait(pipe, select.POLLIN, until)
        piece = os.read(pipe.fileno(), size)
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _wait(pipe: IO[bytes], event: int, until: float) -> None:
    """Waits by `poll`, which also takes file numbers above 1024. Raises TimeoutError."""
    poll = select.poll()
    poll.register(pipe, event)
    left_s = until - time.monotonic()
    if left_s <= 0 or not poll.poll(left_s * 1000):
        raise TimeoutError
