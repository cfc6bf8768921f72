"""Tries in another process whether a caller's grammar compiles within its limits.

What takes too long, too much memory or all of a stack costs that process, and nobody else.
"""

import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from adapters.grammar.compile import GrammarError, GrammarTooCostly, check_source
from adapters.grammar.limits import GrammarLimits
from adapters.grammar.trial_process import Begin

START_TIMEOUT_S = 60.0
# Beyond its processor time, for a machine that is busy.
_PATIENCE = 10.0
_MAX_ANSWER_BYTES = 1 << 16
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from adapters.grammar.trial_process import main; main()"
)


class CheckerUnavailable(Exception):
    """No process can be started now."""


class GrammarChecker:
    """Its processes start when first needed; calls beyond them wait. For any thread.

    vocab_size, end_ids, specials: as in Vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        end_ids: tuple[int, ...],
        specials: dict[int, bytes],
        limits: GrammarLimits,
        processes: int = 1,
    ) -> None:
        self.limits = limits
        begin = msgspec.msgpack.encode(Begin(limits, vocab_size, end_ids, specials))
        self._all = [_Trial(begin, limits) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Trial] = queue.SimpleQueue()
        for trial in self._all:
            self._idle.put(trial)

    def check(self, grammar: str) -> None:
        """Raises GrammarError, CheckerUnavailable."""
        check_source(grammar, self.limits)
        trial = self._idle.get()
        try:
            problem = trial.ask(grammar.encode("utf-8", "replace"))
        finally:
            self._idle.put(trial)
        if problem:
            raise GrammarError(problem)

    def close(self) -> None:
        """End the processes; whoever waits for one hears that it is lost."""
        for trial in self._all:
            trial.stop()


class _Trial:
    """One process, started on demand and again after it was lost."""

    def __init__(self, begin: bytes, limits: GrammarLimits) -> None:
        self._begin = begin
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, grammar: bytes) -> str:
        """What is wrong with it, or "". Raises GrammarTooCostly, CheckerUnavailable."""
        process = self._process or self._start()
        limit_s = self._limits.compile_s + _PATIENCE
        try:
            return _exchange(process, grammar, limit_s).decode()
        except (OSError, EOFError, ValueError):
            self.stop()
            raise GrammarTooCostly(
                f"it needs more than {self._limits.compile_s:g} s of processor time or "
                f"{self._limits.memory_bytes >> 20} MiB of memory to compile"
            ) from None

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises CheckerUnavailable."""
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, _ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={},
            )
        except OSError as error:
            raise CheckerUnavailable("grammars cannot be checked now") from error
        with self._lock:
            self._process = process
        try:
            _exchange(process, self._begin, START_TIMEOUT_S)
        except (OSError, EOFError, ValueError) as error:
            self.stop()
            raise CheckerUnavailable("grammars cannot be checked now") from error
        return process

    def stop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _exchange(process: subprocess.Popen[bytes], frame: bytes, limit_s: float) -> bytes:
    """Raises OSError, EOFError, ValueError (among them a TimeoutError)."""
    assert process.stdin is not None
    until = time.monotonic() + limit_s
    rest = memoryview(len(frame).to_bytes(4, "big") + frame)
    while rest:
        rest = rest[process.stdin.write(rest) :]
    size = int.from_bytes(_read(process, 4, until), "big")
    if size > _MAX_ANSWER_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return _read(process, size, until)


def _read(process: subprocess.Popen[bytes], size: int, until: float) -> bytes:
    assert process.stdout is not None
    data = b""
    while len(data) < size:
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
