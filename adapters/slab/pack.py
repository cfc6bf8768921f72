"""Packs an adapter's weights into a slab, in one pass over the file.

Each piece is checked against the judged content, converted, and written to its place. Packing
takes the memory of a few pieces (`PIECE_BYTES`), of one row of a tensor, and of the LoRA of a
resized table in float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.adapters.base import BaseSpec, Piece, Shard, pieces_of_table, rows_of_shard
from loraplex.adapters.content_check import LEAF_BYTES, Run, Seal, fingerprint_of
from loraplex.adapters.errors import AdapterError, Findings, Violation
from loraplex.adapters.manifest import ITEM_BYTES, SiteLayout, SlabDtype, SlabLayout
from loraplex.adapters.peft.lora_tensors import (
    ExpertsLora,
    LoraTensors,
    ModuleLora,
    OwnTable,
    StackedLora,
)
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
from loraplex.adapters.slab.layout import (
    PlacedMatrix,
    a_matrix,
    b_matrices,
    head_rows,
    norm_rows,
    table_rows,
    vector_rows,
    widths_of,
)
from loraplex.adapters.slab.memory import SlabMemory, one_after_another
from loraplex.adapters.slab.moves import Moves

# Numbers of a slab, whatever its dtype.
Numbers = npt.NDArray[np.unsignedinteger]
_Lora = ModuleLora | ExpertsLora | StackedLora


class SlabTarget(NamedTuple):
    """Some numbers of a tensor, and their place in the slab.

    place: indexed by row, then by column in one dimension or several. rows, columns: of the tensor.
    factor: multiplies the numbers. is_wide: they are float32, whatever the slab's dtype. added:
    LoRA that is added to a table's rows.
    """

    tensor: TensorInfo
    place: Numbers
    rows: range
    columns: slice = slice(None)
    factor: float = 1.0
    is_wide: bool = False
    added: ModuleLora | None = None

    @property
    def whole(self) -> Raw | None:
        """The place of the whole tensor, if the slab has the same numbers in the same order."""
        everything = self.place.size == math.prod(self.tensor.shape)
        as_stored = self.factor == 1 and self.added is None
        if everything and as_stored and self.place.flags.c_contiguous:
            return self.place.reshape(-1).view(np.uint8)
        return None

    def write(self, first: int, block: Numbers) -> None:
        """Copies rows of a tensor to the slab. block: rows from row `first` on."""
        rows = self.rows
        begin = max(0, -(-(first - rows.start) // rows.step))
        end = min(len(rows), -(-(first + len(block) - rows.start) // rows.step))
        if begin >= end:
            return
        chosen = block[rows[begin] - first : rows[end - 1] - first + 1 : rows.step, self.columns]
        place = self.place[begin:end]
        place[...] = chosen.reshape(place.shape)


class Region(NamedTuple):
    """One matrix of the slab, or one of each expert, and the tensors for it."""

    offset: int
    numbers: Numbers
    targets: list[SlabTarget]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    @property
    def is_full(self) -> bool:
        """Whether none of it stays empty: of experts of a smaller rank, or without."""
        return sum(target.place.size for target in self.targets) >= self.numbers.size

    def prepare(self) -> None:
        """Clears the region if some of it stays empty."""
        if not self.is_full:
            self.numbers[...] = 0


def all_regions(
    adapter: LoraTensors, base: BaseSpec, layout: SlabLayout, memory: SlabMemory
) -> Iterator[Region]:
    yield from _of_sites(adapter, base, layout, memory)
    if adapter.head is not None and layout.head is not None:
        item_bytes = ITEM_BYTES[layout.dtype]
        places = head_rows(layout.head, adapter.head, item_bytes)
        for each, (_, tensor) in zip(places, adapter.head.tensors, strict=True):
            for index in range(layout.shards):
                head = _region(memory, each, item_bytes, index * layout.shard_nbytes)
                head.targets.append(SlabTarget(tensor, head.numbers, _rows(tensor)))
                yield head
    if layout.norms is not None:
        item_bytes = ITEM_BYTES[layout.dtype]
        placed = norm_rows(layout.norms, base, item_bytes)
        for index in range(layout.shards):
            norms = _region(memory, placed, item_bytes, index * layout.shard_nbytes)
            for norm, place in zip(adapter.norms, norms.numbers, strict=True):
                rows = _rows(norm.tensor)[norm.norm.part(Shard(index, layout.shards))]
                norms.targets.append(SlabTarget(norm.tensor, place[: len(rows)], rows))
            yield norms


def _region(memory: SlabMemory, placed: PlacedMatrix, item_bytes: int, begin: int = 0) -> Region:
    """A matrix of the slab as a region to write to. begin: of its part of the slab."""
    offset = placed.offset + begin
    raw = np.frombuffer(memory.at(offset, placed.nbytes), np.uint8)
    return Region(offset, raw.view(f"<u{item_bytes}").reshape(placed.shape), [])


def _of_sites(
    adapter: LoraTensors, base: BaseSpec, layout: SlabLayout, memory: SlabMemory
) -> Iterator[Region]:
    modules: dict[tuple[int, str], _Lora] = {
        (lora.layer, lora.module): lora for lora in adapter.modules
    }
    tables = {table.module: table for table in adapter.tables}
    done: set[tuple[int, int]] = set()
    biases = {(bias.layer, bias.module): bias.tensor for bias in adapter.biases}
    own_bytes = ITEM_BYTES[layout.dtype]

    def region(placed: PlacedMatrix, shard: Shard, item_bytes: int = own_bytes) -> Region:
        return _region(memory, placed, item_bytes, shard.index * layout.shard_nbytes)

    for site, index in product(layout.sites, range(layout.shards)):
        shard = Shard(index, layout.shards)
        names = base.site_names(site.layer, site.role)
        loras = [modules.get((site.layer, name)) for name in names]
        a = region(a_matrix(site, base, own_bytes), shard)
        for piece in base.of_site(site.layer, site.role, 0).inputs(shard):
            a.targets.extend(_a_targets(site, loras, a.numbers, piece))
        yield a
        of_parts = enumerate(zip(loras, b_matrices(site, base, own_bytes), strict=True))
        for projection, (lora, placed) in of_parts:
            if lora is not None and placed is not None:
                b = region(placed, shard)
                for piece in base.of_site(site.layer, site.role, projection).outputs(shard):
                    b.targets.extend(_b_targets(lora, b.numbers, piece))
                yield b
        table = table_rows(site, base, own_bytes)
        if table is not None and (table.offset, index) not in done:
            done.add((table.offset, index))
            own_rows = region(table, shard)
            of_table = tables[names[0]]
            own_rows.targets.extend(
                _table_targets(of_table, own_rows.numbers, base.vocab_size, shard)
            )
            yield own_rows
        rows = vector_rows(site, base)
        if rows is not None:
            of_outputs = region(rows, shard, ITEM_BYTES["float32"])
            own = [biases.get((site.layer, name)) for name in names]
            adds = base.of_site(site.layer, site.role, 0).sharding != "row" or index == 0
            of_each = [_of_outputs(*each, adds) for each in zip(loras, own, strict=True)]
            found = _vector_targets(site, of_each, of_outputs.numbers, base, shard)
            of_outputs.targets.extend(found)
            yield of_outputs


def _a_targets(
    site: SiteLayout, loras: Sequence[_Lora | None], numbers: Numbers, piece: Piece
) -> Iterator[SlabTarget]:
    """Lists where a shard's part of each A goes. numbers: the stacked A, `[a_rank, in]`; of the
    embedding `[in, a_rank]`; of experts `[experts, a_rank, in]`. piece: of the inputs, what goes
    where.
    """
    of_embedding = site.role == "embed_tokens"
    numbers = (numbers.T if of_embedding else numbers)[..., piece.target]
    begin = 0
    for lora in loras:
        if lora is None:
            continue
        ranks = slice(begin, begin + lora.lora_rank)
        if isinstance(lora, ModuleLora):
            yield SlabTarget(lora.a, numbers[ranks], _rows(lora.a), piece.source)
        elif isinstance(lora, ExpertsLora):
            for pair in lora.pairs:
                place = numbers[pair.expert, begin : begin + pair.lora_rank]
                yield SlabTarget(pair.a, place, _rows(pair.a), piece.source)
        else:
            yield _stacked_a(lora, numbers[:, ranks], piece.source)
        if site.shares_a:
            return
        begin += lora.lora_rank


def _b_targets(lora: _Lora, numbers: Numbers, piece: Piece) -> Iterator[SlabTarget]:
    """Lists where a shard's part of a B goes. numbers: `[out, rank]`; of experts `[experts, out,
    rank]`. piece: of the outputs, what goes where.
    """
    source, numbers = piece.source, numbers[..., piece.target, :]
    if isinstance(lora, ModuleLora):
        yield SlabTarget(lora.b, numbers, _rows(lora.b)[source])
    elif isinstance(lora, ExpertsLora):
        for pair in lora.pairs:
            place = numbers[pair.expert, :, : pair.lora_rank]
            yield SlabTarget(pair.b, place, _rows(pair.b)[source], factor=pair.factor)
    elif not lora.is_swapped:
        # Columns are ranks, and within a rank experts.
        yield SlabTarget(lora.b, numbers.transpose(1, 2, 0), lora.rows[source])
    else:
        rows = lora.rows[source]
        columns = slice(rows.start, rows.stop, rows.step)
        for expert, own in enumerate(numbers):
            rows = range(expert * lora.lora_rank, (expert + 1) * lora.lora_rank)
            yield SlabTarget(lora.a, own.T, rows, columns)


def _table_targets(
    table: OwnTable, numbers: Numbers, vocab: int, shard: Shard
) -> Iterator[SlabTarget]:
    """Lists where a shard's rows of an adapter's own table go. numbers: `[rows, hidden]`, of the
    tokens whose rows a shard has.
    """
    if table.ids:
        rows = _runs(rows_of_shard(table.ids, vocab, shard))
        yield from _side_by_side(((table.tensor, run) for run in rows), numbers)
        return
    for source, target in pieces_of_table(len(_rows(table.tensor)), vocab, shard):
        parts = _side_by_side(_table_rows(table, source.start, source.stop), numbers[target])
        yield from (part._replace(added=table.lora) for part in parts)


def _side_by_side(
    parts: Iterable[tuple[TensorInfo, range]], numbers: Numbers
) -> Iterator[SlabTarget]:
    """Rows of tensors, one after the other."""
    begin = 0
    for tensor, rows in parts:
        yield SlabTarget(tensor, numbers[begin : begin + len(rows)], rows)
        begin += len(rows)


def _table_rows(table: OwnTable, begin: int, end: int) -> Iterator[tuple[TensorInfo, range]]:
    """Yields the rows of tokens from `begin` up to `end`, in order. They lie in the whole table, or
    in the trained rows."""
    if table.trained is not None:
        places = {token: place for place, token in enumerate(table.trained_ids)}
        for run in _runs(sorted(token for token in places if begin <= token < end)):
            if begin < run.start:
                yield table.tensor, range(begin, run.start)
            for rows in _runs([places[token] for token in run]):
                yield table.trained, rows
            begin = run.stop
    if begin < end:
        yield table.tensor, range(begin, end)


def _runs(places: Sequence[int]) -> Iterator[range]:
    """Yields runs of places that follow each other."""
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield range(places[first], places[end - 1] + 1)
            first = end


def _of_outputs(
    lora: _Lora | None, own_bias: TensorInfo | None, adds: bool
) -> tuple[TensorInfo | None, ...]:
    """Lists the tensors of a projection's vectors, by row. adds: whether this device adds biases;
    where devices sum their products, only one does."""
    if not isinstance(lora, ModuleLora):
        return (None, own_bias if adds else None)
    return (lora.magnitude, own_bias, lora.bias) if adds else (lora.magnitude,)


def _vector_targets(
    site: SiteLayout,
    rows: Sequence[Sequence[TensorInfo | None]],
    numbers: Numbers,
    base: BaseSpec,
    shard: Shard,
) -> Iterator[SlabTarget]:
    """The places of a shard's vectors. rows: of each projection. numbers: of all, side by side."""
    places = np.split(numbers, np.cumsum(widths_of(site, base))[:-1], 1)
    for projection, (tensors, place) in enumerate(zip(rows, places, strict=True)):
        for piece in base.of_site(site.layer, site.role, projection).outputs(shard):
            for row, tensor in zip(place[:, piece.target], tensors, strict=False):
                # That of a smaller table than the base's ends earlier.
                there = range(0) if tensor is None else _rows(tensor)[piece.source]
                if tensor is not None and there:
                    yield SlabTarget(tensor, row[: len(there)], there, is_wide=True)


def _stacked_a(lora: StackedLora, numbers: Numbers, inputs: slice) -> SlabTarget:
    """The place of stacked experts' A. numbers: `[experts, rank, in]`, nothing between experts."""
    if lora.is_swapped:
        return SlabTarget(lora.b, numbers.transpose(2, 1, 0), _rows(lora.b)[inputs])
    return SlabTarget(lora.a, numbers.reshape(-1, numbers.shape[-1]), _rows(lora.a), inputs)


def _rows(tensor: TensorInfo) -> range:
    return range(tensor.shape[0])


class DamagedError(Exception):
    """Weights of another fingerprint or digest: damaged or replaced after they were checked."""


class SlabPlan(NamedTuple):
    """The way to a slab. moves: all there is to do; None = numbers are converted, or parted."""

    layout: SlabLayout
    moves: Moves | None = None


def plan_moves(adapter: LoraTensors, base: BaseSpec, layout: SlabLayout) -> Moves | None:
    """Plans where tensors go that the slab has as they are stored; None = some are not."""
    arena = np.empty(layout.nbytes, np.uint8)  # stands for the slab's memory, and is not written to
    first = arena.__array_interface__["data"][0]
    memory = SlabMemory(layout, arena.data, one_after_another(layout))
    placed: dict[str, tuple[int, TensorInfo]] = {}
    for region in all_regions(adapter, base, layout, memory):
        if not region.is_full:
            return None
        for part in region.targets:
            tensor, whole = part.tensor, part.whole
            is_same = tensor.dtype == STORED_AS[layout.dtype] and not part.is_wide
            if whole is None or not is_same or tensor.name in placed or tensor.nbytes % 8:
                return None
            placed[tensor.name] = whole.__array_interface__["data"][0] - first, tensor
    return Moves.of(placed.values(), layout)


def pack_weights(
    weights: WeightsFile,
    adapter: LoraTensors,
    base: BaseSpec,
    plan: SlabPlan,
    target: SlabMemory,
    seal: Seal,
    run: Run = map,
) -> None:
    """Fills the slab's memory, every byte of it. It is worth nothing unless this returns.

    run: `map`, or that of an executor, whose threads then share the work. Raises DamagedError when
    the seal does not hold, AdapterError `invalid` when values are too large for the slab's dtype.
    """
    if plan.moves is not None:
        if not seal.holds(plan.moves.copy(weights, target, run)):
            raise DamagedError
        return
    layout = plan.layout
    regions = list(all_regions(adapter, base, layout, target))
    of_tensor: dict[str, tuple[TensorInfo, list[SlabTarget]]] = {}
    for region in regions:
        region.prepare()
        for part in region.targets:
            of_tensor.setdefault(part.tensor.name, (part.tensor, []))[1].append(part)
    found = list(run(partial(_pack_some, weights, layout), _shared_out(of_tensor.values())))
    _clear_between(regions, layout, target)
    if not seal.holds(sum(packer.fingerprint for packer in found)):
        raise DamagedError
    findings = Findings()
    for packer in found:
        findings.extend(packer.violations)
    findings.raise_if_any()


_Work = tuple[TensorInfo, list[SlabTarget]]


def _shared_out(work: Iterable[_Work]) -> Iterator[list[_Work]]:
    """Yields tensors in the file's order, some together, as work of one thread."""
    some: list[_Work] = []
    nbytes = 0
    for tensor, targets in sorted(work, key=lambda each: each[0].start):
        some.append((tensor, targets))
        nbytes += tensor.nbytes
        if nbytes >= LEAF_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _pack_some(weights: WeightsFile, layout: SlabLayout, work: list[_Work]) -> "_Packer":
    packer = _Packer(weights, layout)
    for tensor, targets in work:
        packer.pack(tensor, targets)
    return packer


def _clear_between(regions: list[Region], layout: SlabLayout, target: SlabMemory) -> None:
    end = 0
    for region in sorted(regions, key=attrgetter("offset")):
        target.clear(end, region.offset)
        end = region.offset + region.nbytes
    target.clear(end, layout.nbytes)


class _Packer:
    """Reads, checks, converts and writes a piece at a time."""

    def __init__(self, weights: WeightsFile, layout: SlabLayout) -> None:
        self.fingerprint = 0
        self.violations: list[Violation] = []
        self._weights = weights
        self._own_dtype = layout.dtype
        self._read = np.empty(PIECE_BYTES, np.uint8)
        self._rows = np.empty(0, np.uint8)
        self._fitting = True

    def pack(self, tensor: TensorInfo, targets: list[SlabTarget]) -> None:
        self._fitting = True
        # Targets of one tensor are alike.
        dtype: SlabDtype = "float32" if targets[0].is_wide else self._own_dtype
        self._dtype, self._item_bytes = dtype, ITEM_BYTES[dtype]
        whole = targets[0].whole if len(targets) == 1 else None
        if any(target.added for target in targets):
            self._pack_sums(tensor, targets)
        elif whole is not None:
            self._copy(tensor, whole)
        else:
            for first, rows in self._row_blocks(tensor, targets[0].factor):
                for target in targets:
                    target.write(first, rows)
        if not self._fitting:
            message = f"{tensor.name} has values too large for {dtype}"
            self.violations.append(Violation("overflow", tensor.name, message))

    def _pack_sums(self, tensor: TensorInfo, targets: list[SlabTarget]) -> None:
        """Packs a table with the LoRA that is added to its rows, rounded once."""
        loras = {part.added.module: part.added for part in targets if part.added is not None}
        sides = {module: self._sides(lora) for module, lora in loras.items()}
        alike: dict[str, list[SlabTarget]] = {}  # of all shards
        for target in targets:
            alike.setdefault(target.added.module if target.added else "", []).append(target)
        for first, block in self._float_blocks(tensor):
            for module, places in alike.items():
                total = block
                if module in sides:
                    left, right = sides[module]
                    total = block + left[first : first + len(block)] @ right
                raw = np.ascontiguousarray(total).view(np.uint8).reshape(-1)
                self._fitting &= fits(raw, "F32", self._own_dtype)
                rows = np.empty(total.shape, f"<u{ITEM_BYTES[self._own_dtype]}")
                convert_into(raw, "F32", rows.view(np.uint8).reshape(-1), self._own_dtype)
                for place in places:
                    place.write(first, rows)

    def _sides(self, lora: ModuleLora) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Reads `[tokens, rank]` and `[rank, hidden]`, whose product a table's rows get."""
        a, b = (
            np.concatenate([rows.copy() for _, rows in self._float_blocks(tensor)])
            for tensor in lora.tensors
        )
        left, right = (a.T, b.T) if lora.module == "embed_tokens" else (b, a)
        return left, right * np.float32(lora.scale)

    def _float_blocks(self, tensor: TensorInfo) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yields a tensor's rows as `_row_blocks` does, in float32."""
        self._dtype, self._item_bytes = "float32", ITEM_BYTES["float32"]
        for first, rows in self._row_blocks(tensor, 1.0):
            yield first, rows.view(np.float32)

    def _copy(self, tensor: TensorInfo, out: Raw) -> None:
        """Copies a tensor of which the slab has the same numbers in the same order."""
        number_bytes = DTYPE_BYTES[tensor.dtype]
        end = 0
        for position, nbytes in _pieces(tensor):
            start, end = end, end + nbytes // number_bytes * self._item_bytes
            self._piece(tensor, position, nbytes, out[start:end])

    def _row_blocks(self, tensor: TensorInfo, factor: float) -> Iterator[tuple[int, Numbers]]:
        """Yields a first row's number, and the row with some that follow: whole rows, `[rows,
        columns]`, as the slab has their numbers. They mean nothing once the next are asked for.
        """
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
        """Reads and converts a piece; numbers that stay as they are go where they belong."""
        dtype = tensor.dtype
        same = dtype == STORED_AS[self._dtype] and factor == 1
        piece = written if same else self._read[:nbytes]
        self._weights.read_into(position, piece)
        self.fingerprint += fingerprint_of(tensor, piece)
        checked = may_overflow(dtype, self._dtype)
        self._fitting &= not checked or fits(piece, dtype, self._dtype)
        if factor != 1:
            scaled = (read_floats(piece, dtype) * factor).astype("<f4")
            piece, dtype = scaled.view(np.uint8), "F32"
        if not same:
            convert_into(piece, dtype, written, self._dtype)


def _pieces(tensor: TensorInfo) -> Iterator[tuple[int, int]]:
    """Yields the position of each piece in the file, and its bytes."""
    for position in range(tensor.start, tensor.end, PIECE_BYTES):
        yield position, min(PIECE_BYTES, tensor.end - position)


class Unpacked:
    """A `SlabSource`. The content stays where it is until it is closed."""

    on_disk = False

    def __init__(
        self,
        weights: WeightsFile,
        adapter: LoraTensors,
        base: BaseSpec,
        plan: SlabPlan,
        seal: Callable[[], Seal],
        damaged: Callable[[], AdapterError],
        held: ExitStack,
        run: Run = map,
    ) -> None:
        """Takes what packing one adapter needs; nothing is read yet. seal: of the judged content.
        damaged: called when it does not hold. held: closed with this. run: see `pack_weights`.
        """
        self.layout = plan.layout
        self._plan = plan
        self._weights = weights
        self._adapter = adapter
        self._base = base
        self._seal = seal
        self._run = run
        self._damaged = damaged
        self._held = held

    def copy_runs(self, arena: memoryview, first_extents: Sequence[int]) -> None:
        memory = SlabMemory(self.layout, arena, first_extents)
        try:
            pack_weights(
                self._weights,
                self._adapter,
                self._base,
                self._plan,
                memory,
                self._seal(),
                self._run,
            )
        except DamagedError:
            raise self._damaged() from None

    def close(self) -> None:
        self._held.close()
