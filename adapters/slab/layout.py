"""Computes the place of each tensor of a validated adapter in its slab. Pure arithmetic."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import msgspec

from loraplex.adapters.base import (
    MODEL_SITES,
    BaseSpec,
    ModuleShape,
    Role,
    Shard,
    most_rows,
    rows_of_each,
)
from loraplex.adapters.manifest import (
    ITEM_BYTES,
    OwnHead,
    OwnNorms,
    SiteLayout,
    SlabDtype,
    SlabLayout,
)
from loraplex.adapters.peft.lora_tensors import (
    B_BIAS,
    OWN_BIAS,
    OwnBias,
    OwnNorm,
    OwnScores,
    OwnTable,
)
from loraplex.adapters.peft.validate import SlabRoom

ALIGNMENT = 256
_OPEN_EXTENTS = 16


class PlacedMatrix(msgspec.Struct, frozen=True):
    """One matrix of the slab, or one of each expert.

    offset: bytes from the slab's start. shape: as stored, row-major.
    """

    offset: int
    shape: tuple[int, ...]
    nbytes: int


class RankedModule(Protocol):
    """The properties of a module's LoRA that decide its place in a slab; as in `ModuleLora`.

    shares_a: the site's other modules have the same A, and the same rank.
    """

    @property
    def layer(self) -> int: ...
    @property
    def module(self) -> str: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def shares_a(self) -> bool: ...
    @property
    def vectors(self) -> int: ...


class Packable(Protocol):
    """An adapter that is there, or one that is planned."""

    @property
    def modules(self) -> Sequence[RankedModule]: ...
    @property
    def biases(self) -> Sequence[OwnBias]: ...
    @property
    def tables(self) -> Sequence[OwnTable]: ...
    @property
    def head(self) -> OwnScores | None: ...
    @property
    def norms(self) -> Sequence[OwnNorm]: ...


def make_layout(
    adapter: Packable, base: BaseSpec, digest: str, dtype: SlabDtype, extent_bytes: int
) -> SlabLayout:
    """The layout of a slab (`SlabLayout` states the rules). extent_bytes: a positive multiple of
    256."""
    if extent_bytes <= 0 or extent_bytes % ALIGNMENT:
        raise ValueError(f"extent_bytes must be a positive multiple of 256, got {extent_bytes}")
    by_site: dict[tuple[int, str], RankedModule] = {(m.layer, m.module): m for m in adapter.modules}
    own = {(bias.layer, bias.module) for bias in adapter.biases}
    tables = {table.module: table for table in adapter.tables}
    cursor = _Cursor(extent_bytes)
    sites: list[SiteLayout] = []
    placer = _Tables(base, ITEM_BYTES[dtype], cursor)
    for layer, role in _site_order(base):
        names = base.site_names(layer, role)
        modules = [by_site.get((layer, name)) for name in names]
        vectors = tuple(
            (module.vectors if module else 0) | (OWN_BIAS if (layer, name) in own else 0)
            for name, module in zip(names, modules, strict=True)
        )
        table = tables.get(names[0]) if layer < 0 else None
        if any(modules) or any(vectors) or table is not None:
            site = _unplaced(layer, role, modules, vectors)
            site = _place_site(site, base, ITEM_BYTES[dtype], cursor)
            sites.append(site if table is None else placer.place(site, table))
    head = None if adapter.head is None else _place_scores(adapter.head, ITEM_BYTES[dtype], cursor)
    norms = OwnNorms(0, tuple(norm.place for norm in adapter.norms)) if adapter.norms else None
    if norms is not None:
        nbytes = norm_rows(norms, base, ITEM_BYTES[dtype]).nbytes
        norms = msgspec.structs.replace(norms, offset=cursor.place(nbytes))
    return SlabLayout(
        digest=digest,
        base_digest=base.digest,
        dtype=dtype,
        extent_bytes=extent_bytes,
        runs=cursor.runs(),
        sites=tuple(sites),
        shards=base.shards,
        head=head,
        norms=norms,
    )


def room_problem(adapter: Packable, base: BaseSpec, room: SlabRoom) -> str | None:
    """Why an adapter can never be served from this memory, or None. Names the option to raise."""
    layout = make_layout(adapter, base, "", room.dtype, room.extent_bytes)
    for option, needed, nbytes in (
        ("adapter_memory", layout.shard_nbytes, room.device_bytes),
        ("host_adapter_memory", layout.nbytes, room.host_bytes),
    ):
        if needed > nbytes // room.extent_bytes * room.extent_bytes:
            return (
                f"the adapter takes {needed} bytes of memory (packed in {room.dtype}), more "
                f"than the {nbytes} bytes that the worker has for all adapters: the operator can "
                f"raise its option {option} to {needed} or more"
            )
    return None


def a_matrix(site: SiteLayout, base: BaseSpec, item_bytes: int) -> PlacedMatrix:
    """The stacked A of a site; for `embed_tokens`, A transposed; of experts one A each. Of one
    shard, as all that lies in a slab."""
    module = base.of_site(site.layer, site.role, 0).of_shard(base.shards)
    shape: tuple[int, ...] = (site.a_rank, module.in_features)
    if site.role == "embed_tokens":
        shape = shape[::-1]
    return _matrix(site.a_offset, module, shape, item_bytes)


def b_matrices(
    site: SiteLayout, base: BaseSpec, item_bytes: int
) -> tuple[PlacedMatrix | None, ...]:
    """The B of each projection of a site, or of each expert's; None where it is not targeted."""
    result: list[PlacedMatrix | None] = []
    for index, lora_rank in enumerate(site.ranks):
        module = base.of_site(site.layer, site.role, index).of_shard(base.shards)
        shape = (module.out_features, lora_rank)
        placed = _matrix(site.b_offsets[index], module, shape, item_bytes)
        result.append(placed if lora_rank else None)
    return tuple(result)


def vector_rows(site: SiteLayout, base: BaseSpec) -> PlacedMatrix | None:
    """Places a site's vectors of one shard: float32, `[2, outputs]` or more; None = no vectors."""
    if not site.vectors:
        return None
    shape = (num_vectors(site.vectors), sum(widths_of(site, base)))
    return PlacedMatrix(site.vectors_offset, shape, math.prod(shape) * ITEM_BYTES["float32"])


def table_rows(site: SiteLayout, base: BaseSpec, item_bytes: int) -> PlacedMatrix | None:
    """Rows of a table in place of the base's, `[rows, hidden]`; None = the site has none. Of one
    shard, as `loraplex.adapters.base` shares them out."""
    if site.table_offset < 0:
        return None
    vocab, size = base.vocab_size, site.table_size or base.vocab_size
    if site.table_ids:
        rows = most_rows(site.table_ids, vocab, base.shards)
    else:
        rows = rows_of_each(size, vocab, base.shards)
    shape = (rows, base.table_width(site.role))
    return PlacedMatrix(site.table_offset, shape, math.prod(shape) * item_bytes)


def _place_scores(scores: OwnScores, item_bytes: int, cursor: "_Cursor") -> OwnHead:
    """Places the tensors of a score head, which each shard has whole."""
    numbers = tuple(number for number, _ in scores.tensors)
    offsets = tuple(
        cursor.place(math.prod(tensor.shape) * item_bytes) for _, tensor in scores.tensors
    )
    labels = scores.labels.shape[0]
    return OwnHead(offsets[0], labels, scores.of_tokens, numbers[1:], offsets[1:])


def head_rows(head: OwnHead, scores: OwnScores, item_bytes: int) -> Iterator[PlacedMatrix]:
    """The places of a score head's tensors, in their order."""
    for (_, tensor), offset in zip(scores.tensors, (head.offset, *head.offsets), strict=True):
        yield PlacedMatrix(offset, tensor.shape, math.prod(tensor.shape) * item_bytes)


def norm_rows(norms: OwnNorms, base: BaseSpec, item_bytes: int) -> PlacedMatrix:
    """Weights and biases of norms, `[places, numbers of the largest]`, of one shard."""
    first = Shard(0, base.shards)
    parts = (norm.part(first) for norm in base.norms if norm.is_served)
    shape = (len(norms.places), max(part.stop - (part.start or 0) for part in parts))
    return PlacedMatrix(norms.offset, shape, math.prod(shape) * item_bytes)


def num_vectors(vectors: Iterable[int]) -> int:
    """Rows of what a site has for each output. vectors: as of SiteLayout."""
    return 3 if any(bits & B_BIAS for bits in vectors) else 2


def widths_of(site: SiteLayout, base: BaseSpec) -> tuple[int, ...]:
    """Outputs of each projection of a site, of one shard."""
    modules = (base.of_site(site.layer, site.role, i) for i in range(len(site.ranks)))
    return tuple(module.of_shard(base.shards).out_features for module in modules)


def _matrix(
    offset: int, module: ModuleShape, shape: tuple[int, ...], item_bytes: int
) -> PlacedMatrix:
    """Places a module's matrix at an offset of the slab. shape: one expert's, of modules of
    experts. shape: of one expert's.
    """
    if module.is_of_experts:
        shape = (module.experts, *shape)
    return PlacedMatrix(offset, shape, math.prod(shape) * item_bytes)


def _site_order(base: BaseSpec) -> Iterator[tuple[int, Role]]:
    """Yields sites in a step's order, so that the first layers can be used first."""
    yield -1, MODEL_SITES[0]
    for name in base.model_modules:
        if name not in MODEL_SITES:
            yield -1, cast(Role, name)
    for layer, of_layer in enumerate(base.layers):
        for role in of_layer.sites:
            yield layer, role
    yield -1, MODEL_SITES[1]


def _unplaced(
    layer: int,
    role: Role,
    modules: Sequence[RankedModule | None],
    vectors: tuple[int, ...],
) -> SiteLayout:
    """A site whose matrices have no places yet."""
    return SiteLayout(
        layer,
        role,
        ranks=tuple(module.lora_rank if module else 0 for module in modules),
        scales=tuple(module.scale if module else 0.0 for module in modules),
        a_offset=0,
        b_offsets=(0,) * len(modules),
        shares_a=all(module is not None and module.shares_a for module in modules),
        vectors=vectors if any(vectors) else (),
    )


def _place_site(site: SiteLayout, base: BaseSpec, item_bytes: int, cursor: "_Cursor") -> SiteLayout:
    a_offset = cursor.place(a_matrix(site, base, item_bytes).nbytes)
    b_offsets = tuple(
        cursor.place(matrix.nbytes) if matrix else 0
        for matrix in b_matrices(site, base, item_bytes)
    )
    rows = vector_rows(site, base)
    vectors_offset = 0 if rows is None else cursor.place(rows.nbytes)
    return msgspec.structs.replace(
        site, a_offset=a_offset, b_offsets=b_offsets, vectors_offset=vectors_offset
    )


class _Tables:
    """Places rows of tables; those that two sites have once."""

    def __init__(self, base: BaseSpec, item_bytes: int, cursor: "_Cursor") -> None:
        self._base, self._item_bytes, self._cursor = base, item_bytes, cursor
        self._placed: dict[str, int] = {}

    def place(self, site: SiteLayout, table: OwnTable) -> SiteLayout:
        name = "\n".join(tensor.name for tensor in table.tensors)
        vocab = self._base.vocab_size
        size = table.size if table.size > vocab or (table.size < vocab and not table.ids) else 0
        site = msgspec.structs.replace(site, table_offset=0, table_ids=table.ids, table_size=size)
        rows = table_rows(site, self._base, self._item_bytes)
        if name not in self._placed and rows is not None:
            self._placed[name] = self._cursor.place(rows.nbytes)
        return msgspec.structs.replace(site, table_offset=self._placed[name])


class _Cursor:
    """Hands out aligned offsets so that only tensors larger than an extent cross a border.

    A tensor goes into the first of the last few unfilled extents that has room for it. An adapter's
    tensors have few sizes; laid one after the other they would leave a sixth free.
    """

    def __init__(self, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._runs: list[int] = []
        self._end = 0
        # Where free tails of extents begin and end. Few, as every tensor asks all of them.
        self._tails: deque[tuple[int, int]] = deque(maxlen=_OPEN_EXTENTS)

    def place(self, nbytes: int) -> int:
        if nbytes > self._extent_bytes:
            return self._open(len_in_extents(nbytes, self._extent_bytes))
        for number, (start, end) in enumerate(self._tails):
            if start + nbytes <= end:
                del self._tails[number]
                break
        else:
            start = self._open(1)
            end = self._end
        rest = start + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if rest < end:
            self._tails.append((rest, end))
        return start

    def runs(self) -> tuple[int, ...]:
        return tuple(self._runs)

    def _open(self, run: int) -> int:
        """A new run of extents; where it begins."""
        start = self._end
        self._runs.append(run)
        self._end += run * self._extent_bytes
        return start


def len_in_extents(nbytes: int, extent_bytes: int) -> int:
    return -(-nbytes // extent_bytes)
