"""Programs that end with the tests: also when pytest is killed and can stop nothing any more.

The program's own process asks the kernel for SIGKILL at its parent's death, then becomes the
program. What it starts itself is its own business; ours tie their children to them likewise.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tethered(*command: str) -> list[str]:
    """A command line for subprocess or asyncio, to be started by the process that asks for it.

    Start it on a thread that lasts: the kernel ties the child to the thread that started it.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("the parent process is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
