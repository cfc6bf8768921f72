"""Reads a pickle in a confined process, and takes only bounded bytes from it."""

import importlib.util
import os
import select
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

import loraplex
from loraplex.adapters.common import extras
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.validate import MAX_ADAPTER_BYTES
from loraplex.adapters.safetensors.header import MAX_HEADER_BYTES
from loraplex.launcher.convert.unpickle import REFUSED, UNCONFINED, UnpickleOrder

_MODULE = "loraplex.launcher.convert.unpickle"
_POINTER_START = b"version https://git-lfs"
_MIB = 1 << 20
_PIECE_BYTES = 1 << 20
_MAX_WORDS_BYTES = 300


class PickleLimits(msgspec.Struct, frozen=True):
    """What reading one pickle may take. Memory and time grow with the file, as honest ones do.

    file_bytes: of the pickle. spare_bytes: of memory, beside three times the file. spare_s: of
    processor time, beside a second for each 16 MiB; and of time at all, which is four times that.
    """

    file_bytes: int = MAX_ADAPTER_BYTES
    spare_bytes: int = 256 * _MIB
    spare_s: int = 30

    def order(self, nbytes: int, is_confined: bool) -> UnpickleOrder:
        """For a pickle of so many bytes."""
        cpu_s = self.spare_s + nbytes // (16 * _MIB)
        return UnpickleOrder(
            memory_bytes=3 * nbytes + self.spare_bytes,
            cpu_s=cpu_s,
            wall_s=4 * cpu_s,
            tensor_bytes=2 * nbytes,
            is_confined=is_confined,
        )


def read_pickle(
    source: Path, target: Path, is_confined: bool = True, limits: PickleLimits | None = None
) -> None:
    """Writes the tensors of a pickle to a safetensors file, of which nothing is believed yet.

    Raises AdapterError: it cannot be read, took more than the limits, or there is no confinement.
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
        order = limits.order(found.st_size, is_confined)
        _run(source.name, file, target, order)


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for somebody who writes to it, if it is a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _run(name: str, file: IO[bytes], target: Path, order: UnpickleOrder) -> None:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(order).decode()],
        stdin=file,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=_environment(),
        start_new_session=True,
    )
    try:
        broken = _receive(child, target, order)
    finally:
        child.kill()
        _, words = child.communicate()
    if broken is not None:
        raise _refused(name, broken)
    if child.returncode == UNCONFINED:
        message = (
            f"{name} is not opened: this machine does not confine the process that would read it "
            f"({_shown(words)}); --unconfined reads it all the same, and trusts it"
        )
        raise AdapterError("unavailable", message)
    if child.returncode != 0:
        raise _refused(name, _end_of(child.returncode, words, order))


def _environment() -> dict[str, str]:
    """No secret of this process; one thread, so that there can be a namespace."""
    places = [str(Path(loraplex.__file__).parents[1]), *filter(None, sys.path)]
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {"PYTHONPATH": os.pathsep.join(places), **dict.fromkeys(threads, "1")}


def _receive(child: "subprocess.Popen[bytes]", target: Path, order: UnpickleOrder) -> str | None:
    """What the child writes, until its end; or which of its bounds it broke."""
    assert child.stdout is not None
    deadline = time.monotonic() + order.wall_s
    late = f"reading it takes more than {order.wall_s} s"
    room = order.tensor_bytes + MAX_HEADER_BYTES
    with target.open("xb") as out:
        while _is_readable(child.stdout, deadline - time.monotonic()):
            piece = os.read(child.stdout.fileno(), _PIECE_BYTES)
            room -= len(piece)
            if room < 0:
                return f"its tensors take more than {order.tensor_bytes} bytes"
            if piece:
                out.write(piece)
                continue
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
                return None
            return late
    return late


def _is_readable(pipe: IO[bytes], timeout_s: float) -> bool:
    return timeout_s > 0 and bool(select.select([pipe], [], [], timeout_s)[0])


def _end_of(code: int, words: bytes, order: UnpickleOrder) -> str:
    if code == REFUSED:
        return _shown(words)
    if code == -signal.SIGXCPU:
        return f"reading it takes more than {order.cpu_s} s of processor time"
    end = f"signal {-code}" if code < 0 else f"code {code}: {_shown(words)}"
    return f"the process that read it ended by {end}"


def _shown(words: bytes) -> str:
    """What another process says, on one line of ASCII."""
    return ascii(words[:_MAX_WORDS_BYTES].decode("ascii", "replace"))[1:-1]


def _refused(name: str, why: str) -> AdapterError:
    return AdapterError("invalid", f"{name} cannot be converted: {why}")
