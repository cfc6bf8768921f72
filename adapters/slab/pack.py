"""Packs an adapter's weights in one pass over the file. Each piece is checked against what was
judged, converted, and written to its place in the slab.

Beside the slab's own memory it takes that of a few pieces (`PIECE_BYTES` of
`loraplex.adapters.safetensors.file`), and of a row of a tensor.
"""

import math
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.content_check import ContentCheck
from loraplex.adapters.manifest import ITEM_BYTES, SlabDtype, SlabLayout
from loraplex.adapters.peft.lora_tensors import LoraTensors
from loraplex.adapters.safetensors.file import PIECE_BYTES, WeightsFile
from loraplex.adapters.safetensors.floats import (
    STORED_AS,
    Raw,
    convert_into,
    fits,
    may_overflow,
    read_floats,
)
from loraplex.adapters.safetensors.header import DTYPE_BYTES, TensorInfo
from loraplex.adapters.slab.memory import SlabMemory
from loraplex.adapters.slab.targets import Numbers, Region, SlabTarget, all_regions
from loraplex.adapters.violations import Findings


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
    packer = _Packer(weights, layout, check, findings)
    regions = list(all_regions(adapter, base, layout, target))
    of_tensor: dict[str, tuple[TensorInfo, list[SlabTarget]]] = {}
    for region in regions:
        region.prepare()
        for part in region.targets:
            of_tensor.setdefault(part.tensor.name, (part.tensor, []))[1].append(part)
    for tensor, targets in sorted(of_tensor.values(), key=lambda each: each[0].start):
        check.before(tensor.start)
        packer.pack(tensor, targets)
    _clear_between(regions, layout, target)
    if not check.holds():
        raise DamagedError
    findings.raise_if_any()


def _clear_between(regions: list[Region], layout: SlabLayout, target: SlabMemory) -> None:
    end = 0
    for region in sorted(regions, key=attrgetter("offset")):
        target.clear(end, region.offset)
        end = region.offset + region.nbytes
    target.clear(end, layout.nbytes)


class _Packer:
    """Reads, checks, converts and writes a piece at a time."""

    def __init__(
        self, weights: WeightsFile, layout: SlabLayout, check: ContentCheck, findings: Findings
    ) -> None:
        self._weights = weights
        self._own_dtype = layout.dtype
        self._check = check
        self._findings = findings
        self._read = np.empty(PIECE_BYTES, np.uint8)
        self._rows = np.empty(0, np.uint8)
        self._fitting = True

    def pack(self, tensor: TensorInfo, targets: list[SlabTarget]) -> None:
        self._fitting = True
        # Targets of one tensor are alike.
        self._dtype: SlabDtype = "float32" if targets[0].is_wide else self._own_dtype
        self._item_bytes = ITEM_BYTES[self._dtype]
        whole = targets[0].whole if len(targets) == 1 else None
        if whole is not None:
            self._copy(tensor, whole)
        else:
            for first, rows in self._row_blocks(tensor, targets[0].factor):
                for target in targets:
                    target.write(first, rows)
        if not self._fitting:
            message = f"{tensor.name} has values too large for {self._dtype}"
            self._findings.add("overflow", tensor.name, message)

    def _copy(self, tensor: TensorInfo, out: Raw) -> None:
        """The slab has the same numbers in the same order."""
        number_bytes = DTYPE_BYTES[tensor.dtype]
        end = 0
        for position, nbytes in _pieces(tensor):
            start, end = end, end + nbytes // number_bytes * self._item_bytes
            self._piece(tensor, position, nbytes, out[start:end])

    def _row_blocks(self, tensor: TensorInfo, factor: float) -> Iterator[tuple[int, Numbers]]:
        """The number of a first row, and it with some that follow: whole rows, `[rows, columns]`,
        as the slab has their numbers. They mean nothing once the next are asked for."""
        columns = math.prod(tensor.shape[1:])
        row_bytes = columns * self._item_bytes
        number_bytes = DTYPE_BYTES[tensor.dtype]
        most = row_bytes + PIECE_BYTES // number_bytes * self._item_bytes
        if len(self._rows) < most:
            self._rows = np.empty(most, np.uint8)
        first = filled = 0
        for position, nbytes in _pieces(tensor):
            end = filled + nbytes // number_bytes * self._item_bytes
            self._piece(tensor, position, nbytes, self._rows[filled:end], factor)
            count = end // row_bytes
            numbers: Numbers = self._rows[: count * row_bytes].view(f"<u{self._item_bytes}")
            yield first, numbers.reshape(count, columns)
            first, filled = first + count, end - count * row_bytes
            self._rows[:filled] = self._rows[end - filled : end].copy()

    def _piece(
        self, tensor: TensorInfo, position: int, nbytes: int, written: Raw, factor: float = 1.0
    ) -> None:
        """Numbers that need no change are read to where they belong."""
        dtype = tensor.dtype
        same = dtype == STORED_AS[self._dtype] and factor == 1
        piece = written if same else self._read[:nbytes]
        self._weights.read_into(position, piece)
        self._check.update(piece)
        checked = may_overflow(dtype, self._dtype)
        self._fitting &= not checked or fits(piece, dtype, self._dtype)
        if factor != 1:
            scaled = (read_floats(piece, dtype) * factor).astype("<f4")
            piece, dtype = scaled.view(np.uint8), "F32"
        if not same:
            convert_into(piece, dtype, written, self._dtype)


def _pieces(tensor: TensorInfo) -> Iterator[tuple[int, int]]:
    """Where they begin in the file, and their bytes."""
    for position in range(tensor.start, tensor.end, PIECE_BYTES):
        yield position, min(PIECE_BYTES, tensor.end - position)
