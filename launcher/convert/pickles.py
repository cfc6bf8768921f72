"""Reads a pickle in a process of its own, within bounds of memory, time and disk."""

import importlib.util
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec

from loraplex.adapters.common import extras
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.validate import MAX_ADAPTER_BYTES
from loraplex.launcher.convert.unpickle import REFUSED, UnpickleOrder

_MODULE = "loraplex.launcher.convert.unpickle"
_POINTER_START = b"version https://git-lfs"
_MIB = 1 << 20
_MAX_WORDS_BYTES = 300


class PickleLimits(msgspec.Struct, frozen=True):
    """Bounds of reading one pickle. Memory and time grow with the file, as honest ones do.

    file_bytes: of the pickle. spare_bytes: of memory, added to three times the file. spare_s: of
    processor time, added to a second for each 16 MiB; and of time at all, which is four times that.
    """

    file_bytes: int = MAX_ADAPTER_BYTES
    spare_bytes: int = 256 * _MIB
    spare_s: int = 30

    def order(self, nbytes: int) -> UnpickleOrder:
        """The order for a pickle of so many bytes."""
        cpu_s = self.spare_s + nbytes // (16 * _MIB)
        return UnpickleOrder(
            memory_bytes=3 * nbytes + self.spare_bytes,
            cpu_s=cpu_s,
            wall_s=4 * cpu_s,
            tensor_bytes=2 * nbytes,
        )


def read_pickle(source: Path, target: Path, limits: PickleLimits | None = None) -> None:
    """Write the tensors of a pickle to a safetensors file, of which nothing is believed yet.

    Raises AdapterError: the pickle cannot be read, or takes more than the limits.
    """
    limits = limits or PickleLimits()
    if importlib.util.find_spec("torch") is None:
        how = extras.remedy("torch", "convert")
        raise AdapterError("unavailable", f"a pickle is read by torch: {how}")
    with open(source, "rb", buffering=0, opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise AdapterError("invalid", f"{source.name} is not a regular file")
        if found.st_size > limits.file_bytes:
            message = f"{source.name} has {found.st_size} bytes; at most {limits.file_bytes}"
            raise AdapterError("too_large", f"{message} are read")
        if os.pread(file.fileno(), len(_POINTER_START), 0) == _POINTER_START:
            message = "it is a Git-LFS pointer and not the weights; `git lfs pull` fetches them"
            raise _refused(source.name, message)
        _run(source.name, file, target, limits.order(found.st_size))


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for somebody who writes, if the path is a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _run(name: str, file: IO[bytes], target: Path, order: UnpickleOrder) -> None:
    command = [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(order).decode()]
    try:
        done = subprocess.run(
            [*command, str(target.absolute())],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_environment(),
            timeout=order.wall_s,
        )
    except subprocess.TimeoutExpired:
        raise _refused(name, f"reading it takes more than {order.wall_s} s") from None
    if done.returncode != 0:
        raise _refused(name, _end_of(done.returncode, done.stderr, order))


def _environment() -> dict[str, str]:
    """The process's environment: no secret; one thread, whose stack alone takes memory."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def _end_of(code: int, words: bytes, order: UnpickleOrder) -> str:
    if code == REFUSED:
        return _shown(words)
    if code == -signal.SIGXCPU:
        return f"reading it takes more than {order.cpu_s} s of processor time"
    end = f"signal {-code}" if code < 0 else f"code {code}: {_shown(words)}"
    return f"the process that read it ended by {end}"


def _shown(words: bytes) -> str:
    """Another process's words, on one line of ASCII."""
    return ascii(words[:_MAX_WORDS_BYTES].decode("ascii", "replace"))[1:-1]


def _refused(name: str, why: str) -> AdapterError:
    return AdapterError("invalid", f"{name} cannot be converted: {why}")
