"""Pictures padded to tiles: tilings and tokens against transformers, grids that none has."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from loraplex.server.protocol import Grid, TiledForm
from tests.server.pictures.cards import TILED

SIDE = TILED.crop_size
assert isinstance(TILED.form, TiledForm)
FORM = TILED.form
PINPOINTS = [[SIDE * high, SIDE * wide] for high, wide in FORM.tilings]


@given(st.integers(1, 4000), st.integers(1, 4000))
@settings(max_examples=200, deadline=None)
def test_tokens_are_those_of_transformers(width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    grid = TILED.grid(width, height)
    assert FORM.fits(grid)
    of: Any = SimpleNamespace(
        patch_size=14,
        num_additional_image_tokens=0,
        image_processor=SimpleNamespace(image_grid_pinpoints=PINPOINTS),
    )
    processor: Any = LlavaNextProcessor
    of._get_unpadded_features = partial(processor._get_unpadded_features, of)
    expected = processor._get_number_of_features(of, height, width, SIDE, SIDE)
    assert FORM.tokens(grid) == len(TILED.ids(grid)) == expected
    best = select_best_resolution((height, width), PINPOINTS)
    assert best == tuple(SIDE * number for number in FORM.tilings[grid[0] - 1])
    boxes = [box for cut in TILED.cuts(width, height) for box in cut.boxes]
    assert {(right - left, bottom - top) for left, top, right, bottom in boxes} == {(SIDE, SIDE)}
    assert FORM.stack(grid) == (24 * len(boxes), 24)
    assert FORM.patches(grid) <= FORM.patches(FORM.largest(0))


@pytest.mark.parametrize("grid", [(1, 24, 48), (1, 24, 0), (1, 0, 48), (2, 48, 22), (5, 2, 72)])
def test_grids_that_pictures_may_have(grid: Grid) -> None:
    assert FORM.fits(grid)


@pytest.mark.parametrize(
    "grid",
    [(0, 24, 48), (6, 24, 48), (-1, 24, 48), (1, 24, 47), (1, 22, 46), (1, 26, 48), (1, 24, -2)],
)
def test_grids_that_no_picture_has(grid: Grid) -> None:
    assert not FORM.fits(grid)
