"""An encoder of pictures: from pictures' patches to what stands in place of their tokens, and the
pictures on the device.

It runs piece by piece, so that steps come in between.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.engine.executor import PictureCopy, PictureIn, PictureLimits
from loraplex.server.model.decoder import Decoder, PreparedMixer, Stream
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.arena_weights import SiteWeights
from loraplex.server.model.lora.lora import AdapterTable, LoraBatch, Segment
from loraplex.server.model.lora.sites import Site, TowerSites
from loraplex.server.model.ops.products_torch import activated
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.picture_spec import PictureSpec, PoolSpec
from loraplex.server.model.tower.geometry import patch_places
from loraplex.server.model.tower.tower_ops import Heads, RowSpan, TowerOps, TowerPiece, TowerPlan
from loraplex.server.model.weights import AttentionWeights, PoolWeights, TowerWeights
from loraplex.server.protocol import Grid

log = logging.getLogger(__name__)

# Pieces that are launched at once, however few rows they have: the host is as long at each.
_MOST_PIECES = 8
_FAILED = "the picture could not be brought to the device"


class TowerInput(NamedTuple):
    """A picture that goes through the tower. patches: `[patches, columns]` in the model's dtype.
    lora: weights that the adapter has for the tower, by the number of the site; none without one.
    """

    patches: torch.Tensor
    grid: Grid
    lora: dict[int, SiteWeights] = {}


class _PassLora:
    """Adapters of pictures that pass together. rows: how many each picture has."""

    def __init__(self, pictures: Sequence[TowerInput], rows: Sequence[int]) -> None:
        ends = pairwise(accumulate(rows, initial=0))
        self._segments = [
            Segment(*span, each.lora) for span, each in zip(ends, pictures, strict=True)
        ]

    def of(self, rows: RowSpan) -> LoraBatch | None:
        """The adapters of some rows."""
        cut = (
            Segment(max(each.begin, rows.begin), min(each.end, rows.end), each.weights)
            for each in self._segments
        )
        found = tuple(
            Segment(each.begin - rows.begin, each.end - rows.begin, each.weights)
            for each in cut
            if each.begin < each.end and each.weights
        )
        sites = frozenset[int]().union(*(each.weights for each in found))
        return LoraBatch(found, sites, torch.empty(0, dtype=torch.int64)) if found else None


class Tower:
    """The encoder, whole on this device. sites: its own. chunk: rows that go through a layer at
    once."""

    def __init__(
        self,
        pictures: PictureSpec,
        weights: TowerWeights,
        sites: TowerSites,
        device: torch.device,
        chunk: int,
    ) -> None:
        self._spec, self._weights, self._sites = pictures, weights, sites
        self._ops = TowerOps(pictures, device, chunk)
        self._positions = _by_patch(pictures, weights.body.embedding.positions)
        ops: Any = self._ops  # it has what the tower's layers ask for
        self._decoder: Decoder[TowerPlan, Any, Any] = Decoder(
            pictures.tower, weights.body, sites, ops
        )

    def encode(
        self, pictures: Sequence[TowerInput]
    ) -> Generator[float, None, tuple[torch.Tensor, ...]]:
        """Launch the way of pictures, one or some small ones, piece by piece. Yields rows times
        layers of each piece. Returns the results of each picture, `[tokens,
        PictureSpec.result_size]`.
        """
        merger, form = self._spec.merger, self._spec.form
        patches = [len(each.patches) for each in pictures]
        parts = [self._ops.parts(each.grid) for each in pictures]
        rows = [sum(part.rows for part in of) for of in parts]
        tokens = [form.merged(each.grid) for each in pictures]
        lora = _PassLora(pictures, rows)
        every, every_token = RowSpan(0, sum(rows)), RowSpan(0, sum(tokens))
        of_tokens = _PassLora(pictures, tokens).of(every_token)
        hidden = self._embedded(pictures, _PassLora(pictures, patches))
        normed = hidden
        if self._decoder.mixers:
            normed, (hidden, _) = self._decoder.enter(hidden, None, lora.of(every))
        joined = self._weights.joined
        mergers = self._sites.mergers[int(joined is not None) :]
        first, last = self._weights.first, self._weights.body.lm_head
        linears = (last,) if first is None else (first, last)
        every_part = [*chain.from_iterable(parts)]
        plan, deep = self._ops.plan(every_part), list[torch.Tensor]()
        for number, mixer in enumerate(self._decoder.mixers):
            for piece in self._ops.pieces(plan, mixer.layer):
                yield from self._run(plan, mixer, piece, (normed, hidden), lora)
            of_deep = self._weights.deep.get(number)
            if of_deep is not None:
                sites = mergers[len(linears) + 2 * len(deep) :]
                x = self._ops.norm(self._by_token(hidden), of_deep.norm)
                deep.append(self._merged(x, (of_deep.first, of_deep.last), sites, of_tokens))
        found = hidden if merger.reads_stream else normed
        if merger.skipped:
            by_part = found.split([part.rows for part in every_part])
            found = torch.cat([of_one[merger.skipped :] for of_one in by_part])
        by_token = self._by_token(found)
        if merger.pool is not None and self._weights.pool is not None:
            by_token = self._pooled(by_token, merger.pool, self._weights.pool)
        if joined is not None:
            by_feature = by_token.unflatten(1, (form.side**2, -1)).transpose(1, 2).flatten(1)
            by_token = self._ops.linear(by_feature, joined, of_tokens, self._sites.mergers[0])
        if self._weights.norm is not None:
            by_token = self._ops.norm(by_token, self._weights.norm)
        result = self._merged(by_token, linears, mergers, of_tokens)
        split: tuple[torch.Tensor, ...] = torch.cat((result, *deep), dim=1).split(tokens)
        newline, grids = self._weights.newline, (each.grid for each in pictures)
        if newline is None:
            return split
        each_line = zip(split, grids, strict=True)
        return tuple(self._ops.in_lines(vectors, newline, grid) for vectors, grid in each_line)

    def _embedded(self, pictures: Sequence[TowerInput], lora: _PassLora) -> torch.Tensor:
        body = self._weights.body
        patches = [each.patches for each in pictures]
        x = patches[0] if len(patches) == 1 else torch.cat(patches)
        before, behind = self._weights.around
        x = x if before is None else self._ops.norm(x, before)
        hidden = functional.linear(x, body.embed, self._weights.bias)
        adapters = lora.of(RowSpan(0, len(x)))
        if adapters is not None:
            adapters.add(self._sites.patches, x, hidden)
        hidden = hidden if behind is None else self._ops.norm(hidden, behind)
        if self._positions is not None:
            split = hidden.split([len(each) for each in patches])
            grids = (each.grid for each in pictures)
            hidden = torch.cat([*map(self._placed, split, grids)])
        norm = body.embedding.norm
        return hidden if norm is None else self._ops.norm(hidden, norm)

    def _placed(self, hidden: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Add the vectors of a picture's places, also of the rows before the patches of tiles."""
        positions, tile = self._positions, self._spec.form.tile
        assert positions is not None
        if self._spec.embedding.by_axis:
            rows, columns = self._ops.places(grid)
            return hidden + positions[0, columns] + positions[1, rows]
        if not tile:
            return hidden + self._ops.between(positions, grid).to(hidden.dtype)
        by_tile = hidden.unflatten(0, (-1, tile**2))
        before = len(positions) - tile**2
        return (functional.pad(by_tile, (0, 0, before, 0)) + positions).flatten(0, 1)

    def _run(
        self,
        plan: TowerPlan,
        mixer: PreparedMixer,
        piece: TowerPiece,
        tensors: tuple[torch.Tensor, torch.Tensor],
        lora: _PassLora,
    ) -> Iterator[float]:
        """Run a layer of some rows. tensors: normed rows and the stream, `[rows, hidden]` each,
        which become those behind the layer."""
        (normed, hidden), (first, *others) = tensors, piece.products
        heads = self._heads(plan, mixer, first, normed, lora)
        if others:
            heads = heads.begun(piece.products[-1].end)
        for rows in others:
            yield rows.size
            heads.add(rows, self._heads(plan, mixer, rows, normed, lora))
        for sights in piece.steps:
            rows = RowSpan(sights[0].rows.begin, sights[-1].rows.end)
            at = rows.within(0)
            mixed = self._ops.attend(plan, mixer.layer, heads, sights)
            normed[at], (hidden[at], _) = self._decoder.after_mixer(
                mixer.layer, mixed, Stream(hidden[at]), lora.of(rows)
            )
            yield self._ops.cost(sights)

    def _heads(
        self,
        plan: TowerPlan,
        mixer: PreparedMixer,
        rows: RowSpan,
        normed: torch.Tensor,
        lora: _PassLora,
    ) -> Heads:
        """Queries, keys and values of some rows."""
        weights = mixer.weights
        assert isinstance(weights, AttentionWeights)
        x = normed[rows.within(0)]
        qkv = self._ops.linear(x, weights.linears[0], lora.of(rows), mixer.sites[0])
        return self._ops.heads(plan, mixer.layer, rows, qkv, weights.qk_norm)

    def _by_token(self, patches: torch.Tensor) -> torch.Tensor:
        return patches.reshape(-1, self._spec.form.side**2 * patches.shape[-1])

    def _pooled(self, by_token: torch.Tensor, spec: PoolSpec, pool: PoolWeights) -> torch.Tensor:
        """by_token: `[tokens, patches * hidden]` -> `[tokens, hidden]`."""
        means = by_token.unflatten(1, (-1, spec.norm.size)).mean(1, dtype=torch.float32)
        means = means * spec.factor
        if pool.shift is not None:
            means = means - pool.shift
        if pool.scale is not None:
            means = means * pool.scale
        return self._ops.norm(means, pool.norm).to(by_token.dtype)

    def _merged(
        self,
        patches: torch.Tensor,
        linears: Sequence[Linear],
        sites: Sequence[Site],
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        """patches: `[tokens, features]`, as the first of one or two products takes them."""
        found = self._ops.linear(patches, linears[0], lora, sites[0])
        if len(linears) == 1:
            return found
        inner = activated(found, self._spec.merger.activation)
        return self._ops.linear(inner, linears[1], lora, sites[1])


def _by_patch(pictures: PictureSpec, table: torch.Tensor | None) -> torch.Tensor | None:
    """Vectors of positions in the order of patches, where every tile has one grid. table: row by
    row."""
    tile = pictures.form.tile
    if table is None or not tile:
        return table
    before = len(table) - tile**2
    row, column = patch_places((1, tile, tile), pictures.form.side)
    if pictures.embedding.by_fraction:
        of_each = _fraction_places(tile)
        row, column = of_each[row], of_each[column]
    places = torch.from_numpy(before + row * tile + column).to(table.device)
    return torch.cat((table[:before], table[places]))


def _fraction_places(side: int) -> np.ndarray:
    """Rows of a table that rows of as many patches take, int64 `[side]`: how many fractions of the
    whole a patch's own reaches, as torch's float32 has them."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), bounds, right=True).numpy()


class _Coming(NamedTuple):
    """A picture whose patches are on their way. patches: where they are to lie, `[patches,
    columns]`."""

    copy: PictureCopy
    patches: torch.Tensor
    over: "Future[None]"


class EncodeTicket(NamedTuple):
    """Work that was launched, as of `loraplex.server.engine.executor.TowerTicket`. began, done:
    recorded around it; None = it is done, and took `host_s`."""

    is_last: bool
    host_s: float
    began: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None

    def ready(self) -> bool:
        return self.done is None or self.done.query()

    def seconds(self) -> float:
        if self.began is None or self.done is None:
            return self.host_s
        return float(self.began.elapsed_time(self.done)) / 1e3


class _Pass(NamedTuple):
    """Pictures that pass the tower together. work: the rest of it, as of `Tower.encode`."""

    pictures: list[_Coming]
    work: Generator[float, None, tuple[torch.Tensor, ...]]


class PictureStore:
    """The tower, its pictures and their results.

    results: `[num_blocks * block_tokens, PictureSpec.result_size]`, in the model's dtype. Pictures
    pass the tower in the order of their start.
    """

    def __init__(
        self,
        pictures: PictureSpec,
        weights: TowerWeights,
        limits: PictureLimits,
        table: AdapterTable,
    ) -> None:
        """Allocate the results. limits: as of `ExecutorLimits`. table: of adapters."""
        embed = weights.body.embed
        self._device, self._dtype = embed.device, embed.dtype
        self._limits, self._table = limits, table
        assert table.tower is not None
        self._tower = Tower(pictures, weights, table.tower, self._device, limits.chunk)
        rows = limits.num_blocks * limits.block_tokens
        shape = rows, pictures.result_size
        self.results = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._threads = ThreadPoolExecutor(1, "picture-reader")
        self._stream = torch.cuda.Stream() if embed.is_cuda else None
        self._coming: deque[_Coming] = deque()
        self._here: deque[_Coming] = deque()
        self._passing: _Pass | None = None

    def warm(self) -> None:
        """Encode the largest picture there may be: all memory that any takes was asked for then."""
        form = self._limits.form
        grid = form.largest(self._limits.most_tokens)
        shape = (form.patches(grid), self._limits.columns)
        patches = torch.zeros(shape, dtype=self._dtype, device=self._device)
        for _ in self._tower.encode([TowerInput(patches, grid)]):
            pass

    def start(self, copy: PictureCopy, memory: memoryview) -> None:
        """Begin to bring a picture's patches. memory: which the copy's segment lies in. Raises
        nothing: `poll` tells what went wrong."""
        shape = (copy.rows, copy.columns)
        try:
            host = np.frombuffer(memory, np.float32, math.prod(shape), copy.segment).reshape(shape)
            patches = torch.empty(shape, dtype=self._dtype, device=self._device)
            begun = None if self._stream is None else torch.cuda.current_stream().record_event()
            over = self._threads.submit(self._bring, host, patches, begun)
        except (RuntimeError, ValueError) as error:  # no memory, or nothing lies there
            patches, over = self.results[:0], Future()
            over.set_exception(error)
        self._coming.append(_Coming(copy, patches, over))

    def poll(self) -> list[PictureIn]:
        """News of pictures; never blocks."""
        news = []
        while self._coming and self._coming[0].over.done():
            coming = self._coming.popleft()
            error = coming.over.exception()
            if error is None:
                self._here.append(coming)
            else:
                log.error("a picture could not be brought to the device", exc_info=error)
            news.append(PictureIn(coming.copy.blocks[0], None if error is None else _FAILED))
        return news

    def encode(self, pictures: int) -> EncodeTicket:
        """Launch further work, as `Executor.encode` says."""
        stream, began_s = self._stream, time.perf_counter()
        began = None if stream is None else _mark()
        if self._passing is None:
            taken = [self._here.popleft() for _ in range(pictures)]
            self._passing = _Pass(taken, self._tower.encode([*map(self._input, taken)]))
        is_last = self._advance(self._passing)
        done = None if stream is None else _mark()
        return EncodeTicket(is_last, time.perf_counter() - began_s, began, done)

    def _input(self, picture: _Coming) -> TowerInput:
        copy = picture.copy
        lora = self._table.of_tower(copy.adapter_slot, copy.scale)
        return TowerInput(picture.patches, copy.grid, lora)

    def _advance(self, passing: _Pass) -> bool:
        """Launch pieces for about a chunk; whether they were the last."""
        spent = 0.0
        for _ in range(_MOST_PIECES):
            try:
                cost = next(passing.work)
            except StopIteration as end:
                self._keep(passing, end.value)
                return True
            spent += cost
            if spent + cost > self._limits.chunk:  # the next piece is about as large
                break
        return False

    def _keep(self, passing: _Pass, results: tuple[torch.Tensor, ...]) -> None:
        """Keep the results of pictures."""
        self._passing = None
        for picture, tokens in zip(passing.pictures, results, strict=True):
            rows = to_device(self._rows(picture.copy.blocks, len(tokens)), self._device)
            self.results.index_copy_(0, rows, tokens)

    def forget(self) -> None:
        """Forget all pictures on their way."""
        for coming in self._coming:
            coming.over.cancel()
        self._coming.clear()
        self._here.clear()
        self._passing = None

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _rows(self, blocks: tuple[int, ...], tokens: int) -> np.ndarray:
        """Rows of results of a picture's tokens, int64 `[tokens]`."""
        size = self._limits.block_tokens
        return (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)[:tokens]

    def _bring(
        self, stored: np.ndarray, patches: torch.Tensor, begun: torch.cuda.Event | None
    ) -> None:
        """Copy patches to the device, on a thread of their own. begun: recorded when the memory was
        taken, which earlier work may still use.
        """
        with torch.inference_mode():
            host = torch.from_numpy(stored).to(self._dtype)
            if self._stream is None or begun is None:
                patches.copy_(host)
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(begun)
                patches.copy_(host)  # memory that is not pinned: this waits for the copy


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
