"""The system calls that remain to a process that only computes, as a seccomp filter. Pure."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
# Offsets into `struct seccomp_data`.
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_FAIL = 0x00050000  # SECCOMP_RET_ERRNO
_EPERM = 1


class Machine(NamedTuple):
    """architecture: `AUDIT_ARCH_*`. calls: name of each call that is allowed -> its number."""

    architecture: int
    calls: dict[str, int]


# None of these opens, creates or finds anything: no path, no socket, no process, no signal to
# others. What is open already may be read and written.
MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        {
            "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10,
            "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
            "pread64": 17, "writev": 20, "sched_yield": 24, "mremap": 25, "madvise": 28,
            "exit": 60, "sigaltstack": 131, "gettid": 186, "futex": 202, "sched_getaffinity": 204,
            "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231, "getrandom": 318,
        },
    ),
    "aarch64": Machine(
        0xC00000B7,
        {
            "close": 57, "lseek": 62, "read": 63, "write": 64, "writev": 66, "pread64": 67,
            "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98, "clock_gettime": 113,
            "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128,
            "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
            "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226,
            "madvise": 233, "getrandom": 278,
        },
    ),
}  # fmt: skip


def filter_program(machine: Machine) -> bytes:
    """An array of `struct sock_filter`: what is not allowed fails with EPERM.

    A call by another architecture's numbers (x86's 32-bit ones) ends the process. Numbers of x32
    are not in the table, so that they fail, too.
    """
    numbers = sorted(machine.calls.values())
    return b"".join(
        [
            _instruction(_LOAD_WORD, _ARCHITECTURE_AT),
            _instruction(_JUMP_EQUAL, machine.architecture, if_true=1),
            _instruction(_RETURN, _KILL_PROCESS),
            _instruction(_LOAD_WORD, _NUMBER_AT),
            *_jumps(numbers),
            _instruction(_RETURN, _FAIL | _EPERM),
            _instruction(_RETURN, _ALLOW),
        ]
    )


def _jumps(numbers: Sequence[int]) -> list[bytes]:
    """Each leads over those that follow, and over the failure, to the end."""
    return [
        _instruction(_JUMP_EQUAL, number, if_true=len(numbers) - position)
        for position, number in enumerate(numbers)
    ]


def _instruction(code: int, value: int, if_true: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, 0, value)
