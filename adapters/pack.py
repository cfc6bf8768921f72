"""Writes a validated adapter's weights as one slab file, and reads slabs back.

File: magic, length of the msgpack `SlabLayout`, the layout, zeros up to a page, then the payload
whose offsets the layout gives. Memory stays bounded by the largest tensor.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from adapters.base import SITE_PROJECTIONS, BaseSpec
from adapters.disk import hold, publish_file
from adapters.floats import all_finite, convert
from adapters.header import TensorInfo
from adapters.layout import SLAB_ITEM_BYTES, a_matrix, b_matrices
from adapters.manifest import LAYOUT_VERSION, SiteLayout, SlabLayout
from adapters.validate import LoraTensors, ModuleLora
from adapters.violations import Findings
from adapters.weights import WeightsFile, open_weights

PAGE = 4096
_MAGIC = b"LPXSLAB1"
_PREFIX_BYTES = len(_MAGIC) + 8
_MAX_LAYOUT_BYTES = 16 << 20


class SlabError(OSError):
    """The file is not a slab that this version can read."""


def write_slab(
    weights: Path, adapter: LoraTensors, base: BaseSpec, layout: SlabLayout, target: Path
) -> None:
    """Packs the tensors of the safetensors file `weights` into the new file `target`.

    Raises AdapterError `invalid` when values are too large for the slab's dtype.
    """
    modules = {(module.layer, module.module): module for module in adapter.modules}
    findings = Findings()
    with open_weights(weights) as source, target.open("xb") as out:
        payload = _write_prefix(out, layout)
        out.truncate(payload + layout.nbytes)
        writer = _Writer(source, out, payload, layout, findings)
        for site in layout.sites:
            names = SITE_PROJECTIONS[site.kind]
            parts = [modules.get((site.layer, name)) for name in names]
            writer.site(site, parts, base)
        out.flush()
        os.fsync(out.fileno())
    findings.raise_if_any()


class SlabFile:
    """A slab open for reading: its bytes stay, whatever is removed or replaced meanwhile, and no
    `adapters.disk.release` counts it as room until it is closed.

    path: where it lies.
    """

    def __init__(self, path: Path) -> None:
        """Raises SlabError (a short file too), or another OSError."""
        self.path = path
        self._hold = hold(path)
        try:
            self.layout, self._payload = _read_prefix(self._hold.fd)
            nbytes = os.fstat(self._hold.fd).st_size
            if nbytes < self._payload + self.layout.nbytes:
                raise SlabError(f"the slab ends after {nbytes} bytes")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._hold.close()

    def copy_runs(self, target: memoryview, first_extents: Sequence[int]) -> None:
        """Copies the payload into an arena of extents, run by run, without parsing it.

        target: the arena's bytes, writable. first_extents: for each run of the layout, the number
        of the arena's extent where it goes. Raises OSError.
        """
        layout = self.layout
        if len(first_extents) != len(layout.runs):
            raise ValueError(f"{len(first_extents)} places for {len(layout.runs)} runs")
        position = self._payload
        for run, first in zip(layout.runs, first_extents, strict=True):
            start, nbytes = first * layout.extent_bytes, run * layout.extent_bytes
            _read_exactly(self._hold.fd, target[start : start + nbytes], position, nbytes)
            position += nbytes

    def save(self, target: Path) -> None:
        """Copies the whole file to `target`. Raises OSError."""
        with open(self._hold.fd, "rb", closefd=False) as file, target.open("wb") as out:
            file.seek(0)
            shutil.copyfileobj(file, out)

    def publish(self, target: Path) -> None:
        """Makes a staged file appear as `target`; it cannot be evicted before its first reader.

        Raises OSError; then it is closed.
        """
        try:
            publish_file(self.path, target)
        except OSError:
            self.close()
            raise
        self.path = target


def _read_exactly(fd: int, target: memoryview, position: int, nbytes: int) -> None:
    if len(target) != nbytes:
        raise ValueError(f"the arena ends within a run of {nbytes} bytes")
    done = 0
    while done < nbytes:
        count = os.preadv(fd, [target[done:]], position + done)
        if count == 0:
            raise SlabError(f"the slab ends after {position + done} bytes")
        done += count


def _write_prefix(out: BinaryIO, layout: SlabLayout) -> int:
    """Returns the payload's position."""
    encoded = msgspec.msgpack.encode(layout)
    out.write(_MAGIC + len(encoded).to_bytes(8, "little") + encoded)
    return _payload_start(len(encoded))


def _payload_start(layout_bytes: int) -> int:
    return -(-(_PREFIX_BYTES + layout_bytes) // PAGE) * PAGE


def _read_prefix(fd: int) -> tuple[SlabLayout, int]:
    """The layout, and where the payload begins."""
    prefix = os.pread(fd, _PREFIX_BYTES, 0)
    size = int.from_bytes(prefix[len(_MAGIC) :], "little")
    if prefix[: len(_MAGIC)] != _MAGIC or size > _MAX_LAYOUT_BYTES:
        raise SlabError("not a slab file")
    try:
        layout = msgspec.msgpack.decode(os.pread(fd, size, _PREFIX_BYTES), type=SlabLayout)
    except msgspec.DecodeError as error:
        raise SlabError(f"the slab's layout cannot be read: {error}") from error
    if layout.version != LAYOUT_VERSION:
        raise SlabError(f"layout version {layout.version}, expected {LAYOUT_VERSION}")
    return layout, _payload_start(size)


class _Writer:
    """Converts and writes one site at a time."""

    def __init__(
        self,
        source: WeightsFile,
        out: BinaryIO,
        payload: int,
        layout: SlabLayout,
        findings: Findings,
    ) -> None:
        self._source = source
        self._out = out
        self._payload = payload
        self._layout = layout
        self._item_bytes = SLAB_ITEM_BYTES[layout.dtype]
        self._findings = findings

    def site(self, site: SiteLayout, parts: list[ModuleLora | None], base: BaseSpec) -> None:
        stacked = np.concatenate([self._convert(part.a) for part in parts if part], axis=0)
        if site.kind == "embed_tokens":
            stacked = np.ascontiguousarray(stacked.T)
        placed = a_matrix(site, base, self._item_bytes)
        self._write(placed.offset, placed.shape, stacked)
        for part, matrix in zip(parts, b_matrices(site, base, self._item_bytes), strict=True):
            if part is not None and matrix is not None:
                self._write(matrix.offset, matrix.shape, self._convert(part.b))

    def _convert(self, tensor: TensorInfo) -> npt.NDArray[Any]:
        raw = self._source.read(tensor)
        stored = convert(raw, tensor.dtype, self._layout.dtype)
        if not all_finite(stored):
            message = f"{tensor.name} has values too large for {self._layout.dtype}"
            self._findings.add("overflow", tensor.name, message)
        return stored.reshape(tensor.shape)

    def _write(self, offset: int, shape: tuple[int, int], values: npt.NDArray[Any]) -> None:
        if values.shape != shape:
            raise AssertionError(f"packed {values.shape} where the layout has {shape}")
        self._out.seek(self._payload + offset)
        self._out.write(values.data)
