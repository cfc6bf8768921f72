"""A pickle's reader that a hostile file took over: `python -m … ORDER TARGET`."""

import os
import signal
import sys
import time
from pathlib import Path

HEADER = b"""{
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
}"""


def overlap() -> None:
    target = Path(sys.argv[2])
    target.write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(12))


def hang_quietly() -> None:
    os.close(1)
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def shout() -> None:
    os.write(2, b"\x1b[31m\n" * 1000)
    sys.exit(7)


if __name__ == "__main__":
    # The parent passes nothing but the order: the word comes as the name of the file on stdin.
    word = Path(os.readlink("/proc/self/fd/0")).stem
    globals()[word]()
