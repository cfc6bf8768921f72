"""Routing: each row is in exactly one tile, beside rows of its own adapter."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.kernels.lora.segments import (
    MAX_FUSED_ROWS,
    SHARED_ROWS,
    Segments,
    allocate_segments,
    route,
)
from loraplex.server.kernels.lora.table import LoraTable
from tests.kernels.batches import interpreted

RANKS = (1, 16, 17, 32, 33, 256)
RANK_PARTS = (1, 1, 2, 2, 4, 4)


def obvious_tiles(slots: Sequence[int], tile_rows: int) -> list[tuple[int, list[int]]]:
    tiles = []
    for slot in sorted(set(slots), key=lambda s: (s < 0, s)):
        rows = [row for row, s in enumerate(slots) if s == slot]
        tiles += [(slot, rows[i : i + tile_rows]) for i in range(0, len(rows), tile_rows)]
    return tiles


def ranked(ranks: Sequence[int]) -> LoraTable:
    """Slot i has ranks[i] at its second site."""
    table = LoraTable(2, len(ranks), "cpu")
    for slot, rank in enumerate(ranks):
        table.write(slot, 1, 256, [512], [rank], [1.0])
    return table


def routed(
    slots: Sequence[int], segments: Segments, table: LoraTable | None = None
) -> list[tuple[int, list[int]]]:
    """The tiles, each once, all of its parts having been there in order."""
    segments.tiles.fill_(-7)
    segments.order.fill_(-7)
    device = segments.order.device
    table = LoraTable(1, segments.num_slots, device) if table is None else table
    route(torch.tensor(slots, dtype=torch.int32, device=device), segments, table)
    order = segments.order.tolist()
    with_adapter, every = segments.num_tiles.tolist()
    tiles = segments.tiles[:every].tolist()
    assert [slot >= 0 for slot, *_ in tiles] == [True] * with_adapter + [False] * (
        every - with_adapter
    )
    assert sorted(order) == list(range(len(slots)))
    whole = []
    while tiles:
        *tile, share = tiles[0]
        parts = 1 << share
        assert tiles[:parts] == [[*tile, part * 4 + share] for part in range(parts)]
        whole.append(tiles[0])
        tiles = tiles[parts:]
    return [(slot, order[first : first + count]) for slot, first, count, _ in whole]


@interpreted
@given(
    slots=st.lists(st.integers(-1, 5), min_size=1, max_size=40), tile_rows=st.sampled_from([16, 32])
)
@settings(max_examples=25)
def test_tiles_of_any_batch(slots: list[int], tile_rows: int) -> None:
    segments = allocate_segments(len(slots), tile_rows, 6, "cpu")
    assert routed(slots, segments) == obvious_tiles(slots, tile_rows)


@interpreted
@given(slots=st.lists(st.integers(-1, 5), min_size=1, max_size=40), shared=st.booleans())
@settings(max_examples=25)
def test_tiles_of_higher_rank_have_more_parts(slots: list[int], shared: bool) -> None:
    segments = allocate_segments(len(slots), 16, 6, "cpu", shared=shared)
    whole = obvious_tiles(slots, 16)
    assert routed(slots, segments, ranked(RANKS)) == whole
    parts = [
        RANK_PARTS[slot] if shared and slot >= 0 and len(rows) <= SHARED_ROWS else 1
        for slot, rows in whole
    ]
    shares = segments.tiles[: sum(parts), 3].tolist()
    assert [1 << share for share in shares if share < 4] == parts
    assert segments.num_tiles[1] == sum(parts)


@given(
    counts=st.lists(st.integers(0, 300), min_size=7, max_size=7),
    tile_rows=st.sampled_from([16, 64]),
)
@settings(max_examples=25)
def test_tiles_of_many_rows(counts: list[int], tile_rows: int) -> None:
    """Past the one-kernel limit."""
    slots = [slot - 1 for slot, count in enumerate(counts) for _ in range(count)]
    slots += [-1] * max(0, MAX_FUSED_ROWS + 1 - len(slots))
    segments = allocate_segments(len(slots), tile_rows, 6, "cpu")
    assert routed(slots, segments) == obvious_tiles(slots, tile_rows)


@pytest.mark.parametrize("rows", [1, 16, 77, 256, 512, 700])
def test_both_versions_at_their_sizes(device: torch.device, rows: int) -> None:
    slots = [(row * row + row // 5) % 23 - 1 for row in range(rows)]
    segments = allocate_segments(rows, 16, 22, device)
    assert routed(slots, segments) == obvious_tiles(slots, 16)
    assert [t for t in routed([-1] * rows, segments) if t[0] >= 0] == []


def test_refusals() -> None:
    with pytest.raises(ValueError, match="power of two"):
        allocate_segments(4, 24, 1, "cpu")
    with pytest.raises(ValueError, match="513 rows, more than 512, are not shared out"):
        allocate_segments(MAX_FUSED_ROWS + 1, 16, 1, "cpu", shared=True)
    segments, table = allocate_segments(4, 16, 2, "cpu"), LoraTable(1, 2, "cpu")
    with pytest.raises(ValueError, match="int32"):
        route(torch.zeros(4, dtype=torch.int64), segments, table)
    with pytest.raises(ValueError, match="int32"):
        route(torch.zeros(5, dtype=torch.int32), segments, table)
    with pytest.raises(ValueError, match="segments of 2 slots, a table of 1"):
        route(torch.zeros(4, dtype=torch.int32), segments, LoraTable(1, 1, "cpu"))
