"""Kills the processes that answer questions."""

import os
from collections.abc import Iterator

import psutil


def helpers(module: str, parent: int | None = None) -> Iterator[psutil.Process]:
    """Those that run the module, below a process (this one if none is given)."""
    for process in psutil.Process(parent or os.getpid()).children(recursive=True):
        try:
            if module in process.cmdline():
                yield process
        except psutil.Error:
            continue  # it ended meanwhile


def kill_helpers(module: str) -> None:
    """Kill those of this process, not of servers that it has started. Wait until they are dead, but
    leave it to their parent to notice."""
    for process in [each for each in helpers(module) if each.ppid() == os.getpid()]:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
