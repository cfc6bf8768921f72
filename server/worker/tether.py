"""Runs a module of this package in a process that dies with its parent.

The child asks the kernel for SIGKILL at the parent's death, then becomes the module. Doing it there
rather than in a `preexec_fn` is safe beside threads. The child is started by path, so a folder
named `loraplex` in the user's working directory is never imported in place of this package.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def spawn(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    output: int | None = None,
    document: bytes = b"",
) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments`, tied to this process.

    It gets a session of its own: a terminal's Ctrl-C reaches only the parent. Call it on the main
    thread: the kernel ties the child to the thread that started it. environment: None = the
    parent's. output: where stdout and stderr go; None = where the parent's go. document: its stdin.
    """
    root = Path(__file__).parents[3]
    tether = [sys.executable, "-P", __file__, str(os.getpid()), str(root)]
    # Not a pipe, which a long document would fill before the child reads.
    with os.fdopen(os.memfd_create("stdin"), "w+b") as given:
        given.write(document)
        given.seek(0)
        return subprocess.Popen(
            [*tether, module, *arguments],
            env=None if environment is None else dict(environment),
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )


def main(parent: int, root: str, module: str, arguments: Sequence[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("the parent process is gone")
    sys.path.insert(0, root)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
