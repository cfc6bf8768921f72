"""Which numbers of an adapter's tensors go where in its slab, for every form of saved LoRA."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.adapters.base import BaseSpec, SiteKind
from loraplex.adapters.manifest import ITEM_BYTES, SiteLayout, SlabLayout
from loraplex.adapters.peft.lora_tensors import (
    ExpertsLora,
    LoraTensors,
    ModuleLora,
    OwnTable,
    StackedLora,
)
from loraplex.adapters.safetensors.floats import Raw
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.sharding import Piece, Shard
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
from loraplex.adapters.slab.memory import SlabMemory
from loraplex.adapters.token_rows import pieces_of_table, rows_of_shard

# Of a slab, whatever its dtype.
Numbers = npt.NDArray[np.unsignedinteger]
_Lora = ModuleLora | ExpertsLora | StackedLora


class SlabTarget(NamedTuple):
    """Some numbers of a tensor, and their place. rows: which rows of the tensor. columns: which
    columns. place: of each number, indexed by row first, then in the order of the columns, in one
    dimension or several. factor: what the numbers are multiplied with. is_wide: they are float32,
    whatever the slab's dtype."""

    tensor: TensorInfo
    place: Numbers
    rows: range
    columns: slice = slice(None)
    factor: float = 1.0
    is_wide: bool = False

    @property
    def whole(self) -> Raw | None:
        """The place of the whole tensor, if the slab has the same numbers in the same order."""
        everything = self.place.size == math.prod(self.tensor.shape)
        if everything and self.factor == 1 and self.place.flags.c_contiguous:
            return self.place.reshape(-1).view(np.uint8)
        return None

    def write(self, first: int, block: Numbers) -> None:
        """block: rows of the tensor from row `first` on."""
        rows = self.rows
        begin = max(0, -(-(first - rows.start) // rows.step))
        end = min(len(rows), -(-(first + len(block) - rows.start) // rows.step))
        if begin >= end:
            return
        chosen = block[rows[begin] - first : rows[end - 1] - first + 1 : rows.step, self.columns]
        place = self.place[begin:end]
        place[...] = chosen.reshape(place.shape)


class Region(NamedTuple):
    """One matrix of the slab, or one of each expert, and what goes there."""

    offset: int
    numbers: Numbers
    targets: list[SlabTarget]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def prepare(self) -> None:
        """Zeros where nothing may be written: experts of a smaller rank, or without LoRA."""
        if sum(target.place.size for target in self.targets) < self.numbers.size:
            self.numbers[...] = 0


def all_regions(
    adapter: LoraTensors, base: BaseSpec, layout: SlabLayout, memory: SlabMemory
) -> Iterator[Region]:
    yield from _of_sites(adapter, base, layout, memory)
    if adapter.head is not None and layout.head is not None:
        item_bytes = ITEM_BYTES[layout.dtype]
        placed = head_rows(layout.head, base, item_bytes)
        for index in range(layout.shards):
            head = _region(memory, placed, item_bytes, index * layout.shard_nbytes)
            head.targets.append(SlabTarget(adapter.head, head.numbers, _rows(adapter.head)))
            yield head
    if layout.norms is not None:
        item_bytes = ITEM_BYTES[layout.dtype]
        placed = norm_rows(layout.norms, base, item_bytes)
        for index in range(layout.shards):
            norms = _region(memory, placed, item_bytes, index * layout.shard_nbytes)
            for norm, place in zip(adapter.norms, norms.numbers, strict=True):
                norms.targets.append(SlabTarget(norm.tensor, place, _rows(norm.tensor)))
            yield norms


def _region(memory: SlabMemory, placed: PlacedMatrix, item_bytes: int, begin: int = 0) -> Region:
    """begin: of the part of the slab in which it lies."""
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
        loras = [modules.get((site.layer, name)) for name in base.sites[site.kind]]
        a = region(a_matrix(site, base, own_bytes), shard)
        for piece in base.of_site(site.kind, 0).inputs(shard):
            a.targets.extend(_a_targets(site, loras, a.numbers, piece))
        yield a
        of_parts = enumerate(zip(loras, b_matrices(site, base, own_bytes), strict=True))
        for projection, (lora, placed) in of_parts:
            if lora is not None and placed is not None:
                b = region(placed, shard)
                for piece in base.of_site(site.kind, projection).outputs(shard):
                    b.targets.extend(_b_targets(lora, b.numbers, piece))
                yield b
        table = table_rows(site, base, own_bytes)
        if table is not None and (table.offset, index) not in done:
            done.add((table.offset, index))
            own_rows = region(table, shard)
            of_table = tables[base.sites[site.kind][0]]
            own_rows.targets.extend(
                _table_targets(of_table, own_rows.numbers, base.vocab_size, shard)
            )
            yield own_rows
        rows = vector_rows(site, base)
        if rows is not None:
            of_outputs = region(rows, shard, ITEM_BYTES["float32"])
            own = [biases.get((site.layer, name)) for name in base.sites[site.kind]]
            adds = base.of_site(site.kind, 0).sharding != "row" or index == 0
            of_each = [_of_outputs(*each, adds) for each in zip(loras, own, strict=True)]
            found = _vector_targets(site.kind, of_each, of_outputs.numbers, base, shard)
            of_outputs.targets.extend(found)
            yield of_outputs


def _a_targets(
    site: SiteLayout, loras: Sequence[_Lora | None], numbers: Numbers, piece: Piece
) -> Iterator[SlabTarget]:
    """numbers: the stacked A, `[a_rank, in]`; of the embedding `[in, a_rank]`; of experts
    `[experts, a_rank, in]`. piece: of the inputs, what goes where."""
    of_embedding = site.kind == "embed_tokens"
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
    """numbers: `[out, rank]`; of experts `[experts, out, rank]`. piece: of the outputs, what goes
    where."""
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
    """numbers: `[rows, hidden]`, of the tokens whose rows a shard has."""
    if table.ids:
        rows = _runs(rows_of_shard(table.ids, vocab, shard))
        yield from _side_by_side(((table.tensor, run) for run in rows), numbers)
        return
    for source, target in pieces_of_table(len(_rows(table.tensor)), vocab, shard):
        yield from _side_by_side(_table_rows(table, source.start, source.stop), numbers[target])


def _side_by_side(
    parts: Iterable[tuple[TensorInfo, range]], numbers: Numbers
) -> Iterator[SlabTarget]:
    """Rows of tensors, one after the other."""
    begin = 0
    for tensor, rows in parts:
        yield SlabTarget(tensor, numbers[begin : begin + len(rows)], rows)
        begin += len(rows)


def _table_rows(table: OwnTable, begin: int, end: int) -> Iterator[tuple[TensorInfo, range]]:
    """Where the rows of tokens from begin up to end are, in their order: in the whole table, or
    among trained rows apart."""
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
    """Those that follow each other."""
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield range(places[first], places[end - 1] + 1)
            first = end


def _of_outputs(
    lora: _Lora | None, own_bias: TensorInfo | None, adds: bool
) -> tuple[TensorInfo | None, ...]:
    """What goes into each row of a projection's vectors. adds: of devices that sum their products
    one adds biases."""
    if not isinstance(lora, ModuleLora):
        return (None, own_bias if adds else None)
    return (lora.magnitude, own_bias, lora.bias) if adds else (lora.magnitude,)


def _vector_targets(
    kind: SiteKind,
    rows: Sequence[Sequence[TensorInfo | None]],
    numbers: Numbers,
    base: BaseSpec,
    shard: Shard,
) -> Iterator[SlabTarget]:
    """rows: of each projection. numbers: of all of them, side by side."""
    places = np.split(numbers, np.cumsum(widths_of(kind, base))[:-1], 1)
    for projection, (tensors, place) in enumerate(zip(rows, places, strict=True)):
        for piece in base.of_site(kind, projection).outputs(shard):
            for row, tensor in zip(place[:, piece.target], tensors, strict=False):
                if tensor is not None:
                    yield SlabTarget(tensor, row, _rows(tensor)[piece.source], is_wide=True)


def _stacked_a(lora: StackedLora, numbers: Numbers, inputs: slice) -> SlabTarget:
    """numbers: `[experts, rank, in]`, nothing between its experts."""
    if lora.is_swapped:
        return SlabTarget(lora.b, numbers.transpose(2, 1, 0), _rows(lora.b)[inputs])
    return SlabTarget(lora.a, numbers.reshape(-1, numbers.shape[-1]), _rows(lora.a), inputs)


def _rows(tensor: TensorInfo) -> range:
    return range(tensor.shape[0])
