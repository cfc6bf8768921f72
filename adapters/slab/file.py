"""Slab files: packed adapters on disk, written from memory and read into it.

File: magic; length of the msgpack `SlabLayout`, its `Fingerprint` and that of the payload's runs, 8
bytes each; the layout; zeros up to a page. Then the payload, at the layout's offsets.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from loraplex.adapters.common.disk import hold, read_at, write_at
from loraplex.adapters.content_check import Fingerprint
from loraplex.adapters.manifest import LAYOUT_VERSION, SlabLayout
from loraplex.adapters.slab.memory import SlabMemory

PAGE = 4096
_MAGIC = b"LPXSLAB2"
_PREFIX_BYTES = len(_MAGIC) + 3 * 8
_MAX_LAYOUT_BYTES = 16 << 20


class SlabError(OSError):
    """The file is not a slab that this version can read."""


class SlabGarbled(SlabError):
    """The payload is not what was written; the removed file is to be packed anew."""


class SlabSource(Protocol):
    """An adapter that can be brought into an arena, packed."""

    layout: SlabLayout

    @property
    def on_disk(self) -> bool:
        """Whether there is a slab file of it."""
        ...

    def copy_runs(self, arena: memoryview, first_extents: Sequence[int]) -> None:
        """Writes the payload into an arena of extents, every byte of it. The arena's places mean
        nothing until it returns.

        arena: its bytes, writable. first_extents: for each run of all parts, the number of the
        arena's extent where it goes. Raises OSError, AdapterError.
        """
        ...

    def close(self) -> None: ...


def write_slab_file(
    target: Path,
    layout: SlabLayout,
    arena: memoryview,
    first_extents: Sequence[int],
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Writes the file `target` from an arena, as `SlabSource.copy_runs` left it there.

    stopped: asked before each run; once it is true, False is returned and the file is worthless.
    Raises OSError.
    """
    encoded = msgspec.msgpack.encode(layout)
    payload, written = _payload_start(len(encoded)), Fingerprint()
    with target.open("wb", buffering=0) as out:
        for offset, run in SlabMemory(layout, arena, first_extents).runs():
            if stopped():
                return False
            written.update(np.frombuffer(run, np.uint8))
            write_at(out.fileno(), run, payload + offset)
        numbers = (len(encoded), _fingerprint(encoded), written.value)
        prefix = _MAGIC + b"".join(number.to_bytes(8, "little") for number in numbers)
        write_at(out.fileno(), prefix + encoded, 0)
    return True


class SlabFile:
    """A slab open for reading: its bytes stay, whatever is removed or replaced meanwhile, and no
    `loraplex.adapters.common.disk.release` counts it as room until it is closed.

    path: where it lies.
    """

    on_disk = True

    def __init__(self, path: Path) -> None:
        """Opens a slab's file and reads its layout. Raises SlabError (too short), or OSError."""
        self.path = path
        self._hold = hold(path)
        try:
            self.layout, self._payload, self._fingerprint = _read_prefix(self._hold.fd)
            nbytes = os.fstat(self._hold.fd).st_size
            if nbytes < self._payload + self.layout.nbytes:
                raise SlabError(f"the slab ends after {nbytes} bytes")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._hold.close()

    def copy_runs(self, arena: memoryview, first_extents: Sequence[int]) -> None:
        """Copies runs as `SlabSource` does, and parses nothing. Raises SlabGarbled too."""
        found = Fingerprint()
        for offset, run in SlabMemory(self.layout, arena, first_extents).runs():
            _read_exactly(self._hold.fd, run, self._payload + offset)
            found.update(np.frombuffer(run, np.uint8))
        if found.value != self._fingerprint:
            self.path.unlink(missing_ok=True)
            raise SlabGarbled(f"{self.path.name} is not what was written")


def _read_exactly(fd: int, target: memoryview, position: int) -> None:
    done = read_at(fd, target, position)
    if done < len(target):
        raise SlabError(f"the slab ends after {position + done} bytes")


def _payload_start(layout_bytes: int) -> int:
    return -(-(_PREFIX_BYTES + layout_bytes) // PAGE) * PAGE


def _fingerprint(encoded: bytes) -> int:
    found = Fingerprint()
    found.update(np.frombuffer(encoded, np.uint8))
    return found.value


def _read_prefix(fd: int) -> tuple[SlabLayout, int, int]:
    """The layout, where the payload begins, and its fingerprint."""
    prefix = os.pread(fd, _PREFIX_BYTES, 0)
    size, of_layout, of_payload = (
        int.from_bytes(prefix[at : at + 8], "little") for at in (8, 16, 24)
    )
    if prefix[: len(_MAGIC)] != _MAGIC or size > _MAX_LAYOUT_BYTES:
        raise SlabError("not a slab file")
    encoded = os.pread(fd, size, _PREFIX_BYTES)
    if _fingerprint(encoded) != of_layout:
        raise SlabError("the slab's layout is not what was written")
    try:
        layout = msgspec.msgpack.decode(encoded, type=SlabLayout)
    except msgspec.DecodeError as error:
        raise SlabError(f"the slab's layout cannot be read: {error}") from error
    if layout.version != LAYOUT_VERSION:
        raise SlabError(f"layout version {layout.version}, expected {LAYOUT_VERSION}")
    return layout, _payload_start(size), of_payload
