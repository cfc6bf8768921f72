"""The process' side of `Helper`: one answer for each question, in limited processor time.

Frames on stdin and stdout: 4 bytes of length, big-endian, then as many bytes. What the process
reads first is no question. An empty frame answers it once the process is ready.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable

HEAD_BYTES = 4
# The exit status of a process whose question took all the memory that it may have.
OUT_OF_MEMORY = 80


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEAD_BYTES, "big") + data


def read_frame() -> bytes | None:
    """Reads the parent's next frame; None when the parent is gone."""
    head = sys.stdin.buffer.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    return sys.stdin.buffer.read(int.from_bytes(head, "big"))


def limit_self(memory_bytes: int, files: int = 3) -> None:
    """Takes what no answer needs from this process: memory, files, processes."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def answer_questions(answer: Callable[[bytes], bytes], cpu_s: float) -> None:
    """Answers the parent's questions until the parent closes its end. cpu_s: processor time of one
    answer.

    Limits on memory are set before. The call comes when all is ready.
    """
    _write(b"")
    try:
        while (question := read_frame()) is not None:
            # Its default action ends the process, in the middle of a C call if need be.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            reply = answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(reply)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(framed(data))
    sys.stdout.buffer.flush()
