"""Routing: each row is in exactly one tile, beside rows of its own adapter."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.kernels.segments import MAX_FUSED_ROWS, Segments, allocate_segments, route
from tests.kernels.batches import interpreted


def obvious_tiles(slots: Sequence[int], tile_rows: int) -> list[tuple[int, list[int]]]:
    tiles = []
    for slot in sorted(set(slots), key=lambda s: (s < 0, s)):
        rows = [row for row, s in enumerate(slots) if s == slot]
        tiles += [(slot, rows[i : i + tile_rows]) for i in range(0, len(rows), tile_rows)]
    return tiles


def routed(slots: Sequence[int], segments: Segments) -> list[tuple[int, list[int]]]:
    segments.tiles.fill_(-7)
    segments.order.fill_(-7)
    segments.places.fill_(-7)
    device = segments.order.device
    route(torch.tensor(slots, dtype=torch.int32, device=device), segments)
    order = segments.order.tolist()
    with_adapter, every = segments.num_tiles.tolist()
    tiles = segments.tiles[:every].tolist()
    assert [slot >= 0 for slot, *_ in tiles] == [True] * with_adapter + [False] * (
        every - with_adapter
    )
    assert sorted(order) == list(range(len(slots)))
    assert [order[place] for place in segments.places.tolist()] == list(range(len(slots)))
    return [(slot, order[first : first + count]) for slot, first, count, _ in tiles]


@interpreted
@given(
    slots=st.lists(st.integers(-1, 5), min_size=1, max_size=40), tile_rows=st.sampled_from([16, 32])
)
@settings(max_examples=25)
def test_tiles_of_any_batch(slots: list[int], tile_rows: int) -> None:
    segments = allocate_segments(len(slots), tile_rows, 6, "cpu")
    assert routed(slots, segments) == obvious_tiles(slots, tile_rows)


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
    segments = allocate_segments(4, 16, 1, "cpu")
    with pytest.raises(ValueError, match="int32"):
        route(torch.zeros(4, dtype=torch.int64), segments)
    with pytest.raises(ValueError, match="int32"):
        route(torch.zeros(5, dtype=torch.int32), segments)
