"""A helper that does what it is asked to: the name of an act, and a file that says it was done."""

import os
import signal
from pathlib import Path

from loraplex.adapters.helpers.answering import answer_questions, read_frame

CPU_S = 0.3


def main() -> None:
    begin = read_frame() or b""
    answer_questions(lambda question: begin + _act(question.decode()), CPU_S)


def _act(question: str) -> bytes:
    act, _, path = question.partition(" ")
    done = Path(path) if path else None
    if done is not None and done.exists():
        act = "echo"
    elif done is not None:
        done.touch()
    if act == "spin":
        while True:
            pass
    elif act == "exhaust":
        raise MemoryError
    elif act == "babble":
        os.write(1, b"\xff" * 4)
    elif act != "echo":
        os.kill(os.getpid(), signal.Signals[act])
    return question.encode()
