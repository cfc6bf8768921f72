"""Confines this process to what reading a hostile file needs.

Three layers, each sufficient by itself. Namespaces have no network, Landlock allows no file, and a
seccomp filter allows no call that opens, creates or finds anything. A layer that the kernel or a
sandbox does not grant is reported with its reason.
"""

import ctypes
import os
import platform
import resource
import signal
from collections.abc import Mapping
from typing import Literal

from loraplex.launcher.convert.seccomp import MACHINES, filter_program

Layer = Literal["namespaces", "landlock", "seccomp"]

_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_ASK_VERSION = 1
_FIRST_FREE_FD = 3
_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`. What is handled and has no rule is forbidden."""

    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def missing(faults: Mapping[Layer, str]) -> str | None:
    """Why this is not confinement enough: seccomp is needed, and one of the two others.

    faults: of each layer that was not granted, why.
    """
    if "seccomp" not in faults and len(faults) < 2:
        return None
    return "; ".join(f"no {layer}: {fault}" for layer, fault in faults.items())


def enter_namespaces() -> str | None:
    """A user namespace of its own, so without privileges, and a network without a device.

    To be called before there is a second thread. Returns why the kernel does not grant them.
    """
    flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    fault = _fault(_libc.unshare(flags))
    _end_with_parent()
    return fault


def close_files() -> str | None:
    """Landlock: from now on no file can be opened, made, changed or removed, no port connected to.

    Returns why the kernel does not grant it.
    """
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_ASK_VERSION)
    if version < 1:
        return _fault(version)
    # Rights came with versions 2, 3 and 5; ports with 4, scopes of signals and sockets with 6.
    rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    ports, scopes = 3 * (version >= 4), 3 * (version >= 6)
    rules = _Ruleset((1 << rights) - 1, ports, scopes)
    size = 8 * (1 + (version >= 4) + (version >= 6))
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        return _fault(ruleset)
    _forbid_privileges()
    fault = _fault(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return fault


def close_kernel() -> str | None:
    """seccomp: from now on only the calls of `MACHINES`.

    Returns why the kernel does not grant it.
    """
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return f"no list of system calls for {platform.machine()}"
    code = filter_program(machine)
    program = _Program(len(code) // 8, code)
    _forbid_privileges()
    return _fault(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def bound(memory_bytes: int, cpu_s: int) -> None:
    """From now on so much more memory and processor time; nothing open but the standard three.

    No core is dumped, and no file grows.
    """
    os.closerange(_FIRST_FREE_FD, os.sysconf("SC_OPEN_MAX"))
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    _limit(resource.RLIMIT_AS, used_bytes + memory_bytes)
    # A signal at the first limit shows the parent why; the second limit ends programs that ignore
    # signals.
    _limit(resource.RLIMIT_CPU, most_s, most_s + 1)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)


def _end_with_parent() -> None:
    """The kernel kills this process when its parent is gone; others may not look into it.

    A new user namespace takes both back.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    resource.setrlimit(kind, (soft, soft if hard is None else hard))


def _forbid_privileges() -> None:
    """Neither of the layers is granted to a process that could gain privileges."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _fault(result: int) -> str | None:
    return os.strerror(ctypes.get_errno()) if result < 0 else None
