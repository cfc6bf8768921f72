"""Packs an adapter's weights in one pass over the file. Each piece is checked against what was
judged, converted, and written to its place in the slab.

Beside the slab's own memory it takes that of a few pieces (`PIECE_BYTES` of
`adapters.safetensors.file`).
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapters.base import BaseSpec
from adapters.content_check import ContentCheck
from adapters.manifest import ITEM_BYTES, SiteLayout, SlabLayout
from adapters.peft.validate import LoraTensors, ModuleLora
from adapters.safetensors.file import PIECE_BYTES, WeightsFile
from adapters.safetensors.floats import STORED_AS, Raw, convert_into, fits, may_overflow
from adapters.safetensors.header import DTYPE_BYTES, TensorInfo
from adapters.slab.layout import a_matrix, b_matrices
from adapters.slab.memory import SlabMemory
from adapters.violations import Findings


class DamagedError(Exception):
    """The weights are not those that were judged."""


def pack_weights(
    weights: WeightsFile,
    adapter: LoraTensors,
    base: BaseSpec,
    layout: SlabLayout,
    target: SlabMemory,
    check: ContentCheck,
) -> None:
    """Fills the slab's memory, every byte of it. It is worth nothing unless this returns.

    Raises DamagedError when `check` does not hold, AdapterError `invalid` when values are too large
    for the slab's dtype.
    """
    findings = Findings()
    packer = _Packer(weights, layout, target, check, findings)
    places = list(_places(adapter, base, layout))
    for place in sorted(places, key=lambda place: place.tensor.start):
        check.before(place.tensor.start)
        packer.pack(place)
    end = 0
    for place in sorted(places, key=attrgetter("offset")):
        target.clear(end, place.offset)
        end = place.offset + place.nbytes
    target.clear(end, layout.nbytes)
    if not check.holds():
        raise DamagedError
    findings.raise_if_any()


class _Place(NamedTuple):
    """Where a tensor lies in the slab. transposed: its rows are the slab's columns."""

    tensor: TensorInfo
    offset: int
    nbytes: int
    transposed: bool = False


def _places(adapter: LoraTensors, base: BaseSpec, layout: SlabLayout) -> Iterator[_Place]:
    modules = {(module.layer, module.module): module for module in adapter.modules}
    item_bytes = ITEM_BYTES[layout.dtype]
    for site in layout.sites:
        parts = [modules.get((site.layer, name)) for name in base.sites[site.kind]]
        yield from _site_places(site, parts, base, item_bytes)


def _site_places(
    site: SiteLayout, parts: list[ModuleLora | None], base: BaseSpec, item_bytes: int
) -> Iterator[_Place]:
    stacked = a_matrix(site, base, item_bytes)
    transposed = site.kind == "embed_tokens"
    offset = stacked.offset
    for part, matrix in zip(parts, b_matrices(site, base, item_bytes), strict=True):
        if part is None or matrix is None:
            continue
        nbytes = _numbers(part.a) * item_bytes
        yield _Place(part.a, offset, nbytes, transposed)
        offset += nbytes
        yield _fitting(_Place(part.b, matrix.offset, _numbers(part.b) * item_bytes), matrix.nbytes)
    if offset != stacked.offset + stacked.nbytes:
        raise AssertionError(f"A of layer {site.layer} {site.kind} is not as its layout says")


def _fitting(place: _Place, nbytes: int) -> _Place:
    if place.nbytes != nbytes:
        raise AssertionError(f"{place.tensor.name} is not as its layout says")
    return place


def _numbers(tensor: TensorInfo) -> int:
    return tensor.nbytes // DTYPE_BYTES[tensor.dtype]


class _Packer:
    """Reads, checks, converts and writes a piece at a time."""

    def __init__(
        self,
        weights: WeightsFile,
        layout: SlabLayout,
        target: SlabMemory,
        check: ContentCheck,
        findings: Findings,
    ) -> None:
        self._weights = weights
        self._dtype = layout.dtype
        self._item_bytes = ITEM_BYTES[layout.dtype]
        self._target = target
        self._check = check
        self._findings = findings
        self._read = np.empty(PIECE_BYTES, np.uint8)
        self._turned = np.empty(0, np.uint8)

    def pack(self, place: _Place) -> None:
        tensor, fitting = place.tensor, True
        number_bytes = DTYPE_BYTES[tensor.dtype]
        out: Raw = np.frombuffer(self._target.at(place.offset, place.nbytes), np.uint8)
        for position in range(tensor.start, tensor.end, PIECE_BYTES):
            nbytes = min(PIECE_BYTES, tensor.end - position)
            first = (position - tensor.start) // number_bytes
            numbers = range(first, first + nbytes // number_bytes)
            if place.transposed:
                fitting &= self._turn(tensor, position, numbers, out)
            else:
                written = out[numbers.start * self._item_bytes : numbers.stop * self._item_bytes]
                fitting &= self._piece(tensor, position, nbytes, written)
        if not fitting:
            message = f"{tensor.name} has values too large for {self._dtype}"
            self._findings.add("overflow", tensor.name, message)

    def _piece(self, tensor: TensorInfo, position: int, nbytes: int, written: Raw) -> bool:
        """Whether its numbers fit. Those that need no change are read to where they belong."""
        same = tensor.dtype == STORED_AS[self._dtype]
        piece = written if same else self._read[:nbytes]
        self._weights.read_into(position, piece)
        self._check.update(piece)
        if not same:
            convert_into(piece, tensor.dtype, written, self._dtype)
        checked = may_overflow(tensor.dtype, self._dtype)
        return not checked or fits(piece, tensor.dtype, self._dtype)

    def _turn(self, tensor: TensorInfo, position: int, numbers: range, out: Raw) -> bool:
        """A piece whose numbers go to the columns of `out`."""
        nbytes = len(numbers) * self._item_bytes
        if len(self._turned) < nbytes:
            self._turned = np.empty(nbytes, np.uint8)
        turned = self._turned[:nbytes]
        fitting = self._piece(tensor, position, len(numbers) * DTYPE_BYTES[tensor.dtype], turned)
        rows, columns = tensor.shape
        matrix = _as_numbers(out, self._item_bytes).reshape(columns, rows)
        values = _as_numbers(turned, self._item_bytes)
        at = numbers.start
        while at < numbers.stop:
            row, column = divmod(at, columns)
            stop = min(numbers.stop, at - column + columns)
            part = values[at - numbers.start : stop - numbers.start]
            matrix[column : column + len(part), row] = part
            at = stop
        return fitting


def _as_numbers(raw: Raw, item_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    numbers: npt.NDArray[np.unsignedinteger] = raw.view(f"<u{item_bytes}")
    return numbers
