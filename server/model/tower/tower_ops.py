"""Operations of an encoder of pictures, in plain torch on every device, and which rows they compute
at once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, repeat
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.model.linear.dense import ClippedLinear
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.lora import LoraBatch
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.products_torch import TorchProducts, with_values
from loraplex.server.model.ops.rope import cos_sin, inverse_frequencies
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.ops.turned_heads import StepTurns, Turn, turned_heads
from loraplex.server.model.spec.model_spec import AttentionSpec
from loraplex.server.model.spec.picture_spec import PictureSpec
from loraplex.server.model.tower.geometry import patch_places, table_taps, token_order, window_table
from loraplex.server.protocol import Grid, TiledForm


class RowSpan(NamedTuple):
    """Rows begin .. end of a pass."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def within(self, begin: int) -> slice:
        """The same, counted from a row."""
        return slice(self.begin - begin, self.end - begin)


class WindowTable(NamedTuple):
    """Windows of some rows. patches: int64 `[windows, most]`, counted from the first of the rows;
    what fills up a window is any patch. seen: bool `[windows, 1, 1, most]`, False for that; None =
    every window is full. places: int64 `[rows]`, of each row among all places of windows."""

    patches: np.ndarray
    seen: np.ndarray | None
    places: np.ndarray


class Sight(NamedTuple):
    """Rows that attend to others. keys: the rows that each of them sees; windows: None, or each
    sees those of its window alone, and `keys` are the same rows."""

    rows: RowSpan
    keys: RowSpan
    windows: WindowTable | None = None


class TowerPiece(NamedTuple):
    """Rows whose queries, keys and values are there at once. products: these rows, as many as are
    multiplied at once. steps: parts of them, each of which goes through the rest of a layer."""

    products: tuple[RowSpan, ...]
    steps: tuple[tuple[Sight, ...], ...]


class TowerWork(NamedTuple):
    """The work of a layer that sees whole pictures, and of one of windows."""

    whole: tuple[TowerPiece, ...]
    windowed: tuple[TowerPiece, ...]


class TowerPart(NamedTuple):
    """A part of a picture whose rows see each other: height, width in patches. before: rows before
    those of its patches."""

    height: int
    width: int
    before: int = 0

    @property
    def rows(self) -> int:
        return self.height * self.width + self.before


class WorkSizes(NamedTuple):
    """chunk: rows that go through a layer at once. even: with so many rows to see, a row attends
    for as long as it is multiplied. side: as of PictureForm. window: as of PictureSpec."""

    chunk: int
    even: int
    side: int
    window: int


def plan_work(parts: Sequence[TowerPart], sizes: WorkSizes) -> TowerWork:
    """Divide the work on parts that pass together. What becomes one token stays together."""
    bounds = [RowSpan(*ends) for ends in pairwise(accumulate((p.rows for p in parts), initial=0))]
    if len(parts) > 1:
        whole = [Sight(rows, rows) for rows in bounds]
        windows = map(_windowed, parts, bounds, repeat(sizes)) if sizes.window else ()
        return TowerWork(_grouped(whole, sizes.chunk), _grouped(windows, sizes.chunk))
    ((part,), (every,)), unit = (parts, bounds), sizes.side**2
    products = tuple(_cut(every, sizes.chunk, unit))
    at_once = sizes.chunk * sizes.even // (sizes.even + every.size)
    steps = tuple((Sight(rows, every),) for rows in _cut(every, at_once, unit))
    # Lines of tokens, as many as a window is high, or some times so many.
    stripe = sizes.window * sizes.side * part.width
    stripes = _cut(every, sizes.chunk, stripe) if sizes.window else ()
    windowed = (TowerPiece((rows,), ((_windowed(part, rows, sizes),),)) for rows in stripes)
    return TowerWork((TowerPiece(products, steps),), tuple(windowed))


def _grouped(sights: Iterable[Sight], most: int) -> tuple[TowerPiece, ...]:
    """Pieces of neighbours that need no others."""
    groups: list[list[Sight]] = []
    for sight in sights:
        if not groups or sight.rows.end - groups[-1][0].rows.begin > most:
            groups.append([])
        groups[-1].append(sight)
    return tuple(
        TowerPiece((RowSpan(group[0].rows.begin, group[-1].rows.end),), (tuple(group),))
        for group in groups
    )


def _cut(rows: RowSpan, most: int, unit: int) -> Iterator[RowSpan]:
    size = max(most // unit, 1) * unit
    for begin in range(rows.begin, rows.end, size):
        yield RowSpan(begin, min(begin + size, rows.end))


def _windowed(part: TowerPart, rows: RowSpan, sizes: WorkSizes) -> Sight:
    """Divide rows of a part, which are whole windows."""
    lines = rows.size // part.width
    table = window_table((1, lines, part.width), sizes.side, sizes.window)
    is_patch = table >= 0
    places = np.empty(rows.size, dtype=np.int64)
    places[table[is_patch]] = np.flatnonzero(is_patch)
    seen = None if is_patch.all() else is_patch[:, None, None]
    return Sight(rows, rows, WindowTable(np.maximum(table, 0), seen, places))


class _Windows(NamedTuple):
    """A WindowTable on the device."""

    patches: torch.Tensor
    seen: torch.Tensor | None
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class TowerPlan:
    """Preparation of the attention of pictures that pass together. positions: int64 `[rows]`, lines
    of their pictures. rope: cos and sin, `[rows, 1, n]`, of each rotation. whole, windowed: as of
    TowerWork. tables: of all that have windows."""

    positions: torch.Tensor
    rope: dict[Turn, tuple[torch.Tensor, torch.Tensor]]
    whole: tuple[TowerPiece, ...]
    windowed: tuple[TowerPiece, ...]
    tables: dict[RowSpan, _Windows]

    def turns(self, rows: slice) -> StepTurns:
        """The rotations of some rows."""
        return StepTurns({turn: (c[rows], s[rows]) for turn, (c, s) in self.rope.items()}, {})


class Heads(NamedTuple):
    """Queries, keys and values of rows from `begin` on, `[rows, heads, head_dim]` each."""

    begin: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def begun(self, end: int) -> "Heads":
        """Room for all rows up to `end`, the first of which are these."""
        room = (x.new_empty(end - self.begin, *x.shape[1:]) for x in self[1:])
        found = Heads(self.begin, *room)
        found.add(RowSpan(self.begin, self.begin + len(self.q)), self)
        return found

    def add(self, rows: RowSpan, heads: "Heads") -> None:
        """Put those of some rows in their room."""
        at = rows.within(self.begin)
        for room, own in zip(self[1:], heads[1:], strict=True):
            room[at] = own


def _by_pairs(qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Order features of heads so that those which turn together lie half a head apart, as they do
    in each half of it: scores stay. Values stay as they are. qkv: `[..., heads * head_dim]`."""
    heads = qkv.unflatten(-1, (-1, 2, 2, spec.head_dim // 4))
    turned = heads.transpose(-3, -2).flatten(-4)
    behind = spec.q_size + spec.kv_size
    return torch.cat((turned[..., :behind], qkv[..., behind:]), dim=-1)


class TowerOps(TorchProducts):
    """Operations of one tower. Each patch sees those of its window, or all of its picture.

    chunk: rows that go through a layer at once.
    """

    def __init__(self, pictures: PictureSpec, device: torch.device, chunk: int) -> None:
        self._spec, self._device = pictures, device
        of = pictures.tower.hidden_size
        self._before = int(bool(pictures.embedding.first))
        # Products of a layer take about 24 * hidden_size**2 operations a row, attention to a row
        # takes 4 * hidden_size.
        self._sizes = WorkSizes(chunk, 6 * of, pictures.form.side, pictures.window)

    def attention(self, layer: int) -> AttentionSpec:
        return self._spec.tower.layers[layer].attention

    def linear(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: LoraBatch | None,
        site: Site,
        out: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if lora is None or not isinstance(linear, ClippedLinear):
            return super().linear(x, linear, lora, site, out, delta)
        return linear.run(x, add=partial(lora.add, site))

    def parts(self, grid: Grid) -> list[TowerPart]:
        """The parts of a picture, whose rows see each other: its tiles, or all of it."""
        form = self._spec.form
        height, width = form.stack(grid)
        count = height // form.tile if form.tile else 1
        return [TowerPart(height // count, width, self._before)] * count

    def plan(self, parts: Sequence[TowerPart]) -> TowerPlan:
        """Prepare the attention of parts of pictures that pass together."""
        side = self._spec.form.side
        found = [patch_places((1, part.height, part.width), side) for part in parts]
        places = to_device(np.concatenate(found, axis=1), self._device)
        work = plan_work(parts, self._sizes)
        sights = (sight for piece in work.windowed for step in piece.steps for sight in step)
        tables = {sight.rows: self._table(sight) for sight in sights}
        return TowerPlan(places[0], self._turned(places), work.whole, work.windowed, tables)

    def pieces(self, plan: TowerPlan, layer: int) -> tuple[TowerPiece, ...]:
        """The work of a layer."""
        return plan.whole if self.attention(layer).window is None else plan.windowed

    def cost(self, sights: Sequence[Sight]) -> float:
        """How many rows that see few others take as long to go through a layer."""
        return sum(
            sight.rows.size * (1 + (sight.windows is None) * sight.keys.size / self._sizes.even)
            for sight in sights
        )

    def _table(self, sight: Sight) -> _Windows:
        assert sight.windows is not None
        patches, seen, places = (
            None if each is None else to_device(each, self._device) for each in sight.windows
        )
        assert patches is not None
        assert places is not None
        return _Windows(patches, seen, places)

    def _turned(self, places: torch.Tensor) -> dict[Turn, tuple[torch.Tensor, torch.Tensor]]:
        attention = self.attention(0) if self._spec.tower.layers else None
        if attention is None or attention.rope is None:
            return {}
        places = places.flip(0) if self._spec.in_halves else places
        # Half of the pairs turn by the row, and half by the column.
        inv_freq = inverse_frequencies(attention.rope, attention.head_dim, self._device)
        of_axes = inv_freq[::2], inv_freq[int(self._spec.splits) :: 2]
        by_axis = [cos_sin(axis, own, 1.0) for axis, own in zip(places, of_axes, strict=True)]
        cos, sin = (torch.cat(both, dim=-1) for both in zip(*by_axis, strict=True))
        return {(attention.rope, attention.head_dim): (cos, sin)}

    def places(self, grid: Grid) -> torch.Tensor:
        """Row and column of each patch of a picture, int64 `[2, patches]`."""
        return to_device(patch_places(grid, self._spec.form.side), self._device)

    def between(self, table: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Vectors of patches' places, float32 `[patches, hidden]`. table: `[positions, hidden]`."""
        taps = table_taps(grid, self._spec.form.side, isqrt(len(table)))
        rows, factors = (to_device(each, self._device) for each in taps)
        found = table[rows[0]] * factors[0, :, None]
        for row, factor in zip(rows[1:], factors[1:], strict=True):
            found = found + table[row] * factor[:, None]
        return found

    def in_lines(self, vectors: torch.Tensor, newline: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Lay vectors of a TiledForm's patches, `[patches, n]`, as tokens: `[tokens, n]`."""
        form = self._spec.form
        assert isinstance(form, TiledForm)
        order = to_device(token_order(form, grid), self._device)
        return torch.cat((vectors, newline[None]))[order]

    def heads(
        self,
        plan: TowerPlan,
        layer: int,
        rows: RowSpan,
        qkv: torch.Tensor,
        norm: torch.Tensor | None,
    ) -> Heads:
        """Queries, keys and values of rows, normed and rotated. qkv, norm: as of `Ops.attend`."""
        turns, spec = plan.turns(rows.within(0)), self.attention(layer)
        if spec.norms_values:
            qkv = with_values(qkv, spec)
        if self._spec.in_halves:
            qkv = _by_pairs(qkv, spec)
            norm = None if norm is None else _by_pairs(norm.flatten(), spec).view_as(norm)
        return Heads(rows.begin, *turned_heads(spec, qkv, norm, turns))

    def attend(
        self, plan: TowerPlan, layer: int, heads: Heads, sights: Sequence[Sight]
    ) -> torch.Tensor:
        """Attend to rows that see each other: -> `[rows, heads * head_dim]`, of the sights in their
        order."""
        found = [self._attend(plan, layer, heads, sight) for sight in sights]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend(self, plan: TowerPlan, layer: int, heads: Heads, sight: Sight) -> torch.Tensor:
        scale = self.attention(layer).scale
        rows, keys = (each.within(heads.begin) for each in (sight.rows, sight.keys))
        q, k, v = heads.q[rows], heads.k[keys], heads.v[keys]
        if sight.windows is None:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            found = functional.scaled_dot_product_attention(q, k, v, scale=scale)
            return found[0].transpose(0, 1).flatten(1)
        windows = plan.tables[sight.rows]
        q, k, v = (x[windows.patches].transpose(1, 2) for x in (q, k, v))
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=windows.seen, scale=scale
        )
        return found.transpose(1, 2).flatten(0, 1)[windows.places].flatten(1)
