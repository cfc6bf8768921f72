"""Decoded patches against transformers' processor, bit by bit."""

import io
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_processing_utils import select_best_resolution
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from loraplex.server.model.tower.geometry import patch_places
from loraplex.server.protocol import (
    Grid,
    PictureForm,
    PixelBounds,
    TiledForm,
    VisionCard,
    read_picture_head,
)
from loraplex.server.worker.pictures.decoder import write_patches
from loraplex.server.worker.pictures.decoding import outcome
from loraplex.server.worker.pictures.jobs import DecodeJob
from tests.server.pictures.cards import (
    CLIP,
    GEMMA3,
    GEMMA4,
    PIXTRAL,
    QWEN,
    QWEN3,
    SIGLIP,
    TILED,
    UNIFIED,
)
from tests.server.pictures.files import MODES, written

SMALL = msgspec.structs.replace(QWEN, max_pixels=50000)
SMALL3 = msgspec.structs.replace(QWEN3, max_pixels=90000)
# The second one's square is larger than some pictures, and black around them.
CLIPS = {
    "usual": CLIP,
    "black": msgspec.structs.replace(
        CLIP, patch_size=8, shortest_edge=31, crop_size=56, form=PictureForm(tile=7)
    ),
    "siglip": SIGLIP,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4_unified": UNIFIED,
    "part": msgspec.structs.replace(
        CLIP, patch_size=8, shortest_edge=75, crop_size=40, form=PictureForm(tile=5)
    ),
}
PIXTRALS = {
    "pixtral": msgspec.structs.replace(PIXTRAL, longest_edge=300),
    "pixtral12": msgspec.structs.replace(
        PIXTRAL, patch_size=16, form=PictureForm(), longest_edge=440
    ),
}
TILINGS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
# SigLIP's tiles have pixels beside those of their patches.
TILES = {
    "tiled": msgspec.structs.replace(TILED, crop_size=48, form=TiledForm(tile=3, tilings=TILINGS)),
    "tiled_siglip": msgspec.structs.replace(
        TILED, patch_size=8, crop_size=45, form=TiledForm(tile=5, tilings=((1, 1), (4, 2), (2, 6)))
    ),
}
CARDS = {"small": SMALL, "small3": SMALL3, **CLIPS, **PIXTRALS, **TILES}


def patches_of(
    data: bytes, card: VisionCard, pixels: PixelBounds = (0, 0)
) -> tuple[np.ndarray, tuple[int, int, int]]:
    head = read_picture_head(data)
    grid = card.bounded(pixels).grid(head.width, head.height)
    found = outcome(DecodeJob(data, grid, pixels), card)
    assert found.fault is None
    patches = np.full((card.form.patches(grid), card.columns), np.nan, np.float32)
    write_patches(found.pixels, grid, card, patches)
    return patches, grid


def expected(data: bytes, card: VisionCard) -> tuple[np.ndarray, tuple[int, ...]]:
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if isinstance(card.form, TiledForm):
        return expected_of_tiles(picture, card, card.form)
    if card.rule == "clip":
        return expected_of_clip(picture, card)
    if card.rule == "pixtral":
        unit = {"height": card.unit, "width": card.unit}
        size = {"longest_edge": card.longest_edge}
        processor: Any = PixtralImageProcessorPil(patch_size=unit, size=size)
        return cut(processor(picture, return_tensors="np")["pixel_values"][0], card)
    if card.rule == "gemma4":
        return expected_of_gemma4(picture, card)
    size = {"shortest_edge": card.min_pixels, "longest_edge": card.max_pixels}
    colours: dict[str, Any] = {"image_mean": [*card.mean], "image_std": [*card.std]}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=card.patch_size, **colours)
    made = processor(picture, return_tensors="np")
    return made["pixel_values"], tuple(made["image_grid_thw"][0])


def expected_of_clip(picture: Image.Image, card: VisionCard) -> tuple[np.ndarray, tuple[int, ...]]:
    side, patch = card.crop_size, card.patch_size
    square = {"height": side, "width": side}
    if not card.shortest_edge:
        of_card = {2: Gemma3ImageProcessorPil, 3: SiglipImageProcessorPil}[card.resample]
        processor: Any = of_card(size=square)
    else:
        processor = CLIPImageProcessorPil(
            size={"shortest_edge": card.shortest_edge}, crop_size=square
        )
    pixels = processor(picture, return_tensors="np")["pixel_values"][0]
    seen = side // patch * patch
    return cut(pixels[:, :seen, :seen], card)


def expected_of_tiles(
    picture: Image.Image, card: VisionCard, form: TiledForm
) -> tuple[np.ndarray, tuple[int, ...]]:
    side, seen = card.crop_size, form.tile * card.patch_size
    of_tile = {"height": side, "width": side}
    pinpoints = [[side * high, side * wide] for high, wide in form.tilings]
    sizes: dict[str, Any] = {"size": of_tile, "crop_size": of_tile}
    processor = LlavaNextImageProcessorPil(image_grid_pinpoints=pinpoints, **sizes)
    made = processor(picture, return_tensors="np")
    tiles = [cut(tile[:, :seen, :seen], card)[0] for tile in made["pixel_values"][0]]
    best = select_best_resolution(tuple(made["image_sizes"][0]), pinpoints)
    return np.concatenate(tiles), tuple(length // side for length in best)


def expected_of_gemma4(
    picture: Image.Image, card: VisionCard
) -> tuple[np.ndarray, tuple[int, ...]]:
    """As the encoder scales what the processor gives."""
    made = Gemma4ImageProcessorPil(max_soft_tokens=70)(picture, return_tensors="np")
    places = made["image_position_ids"][0]
    wide, high = (int(most) + 1 for most in places.max(axis=0))
    if card.form.side == 1:  # patches of a token's size
        shape = high // 3, 3, wide // 3, 3, 16, 16, 3
        found = made["pixel_values"][0][: high * wide].reshape(shape)
        return found.transpose(0, 2, 1, 4, 3, 5, 6).reshape(-1, card.columns), (
            1,
            high // 3,
            wide // 3,
        )
    rows, columns = patch_places((1, high, wide), card.form.side)
    patches = made["pixel_values"][0][rows * wide + columns]
    assert card.form.tokens((1, high, wide)) == made["num_soft_tokens_per_image"][0]
    return (2 * (patches - np.float32(0.5))).astype(np.float32), (1, high, wide)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([70, 280, 1120]))
def test_sizes_of_gemma4_are_those_of_transformers(width: int, height: int, most: int) -> None:
    card = msgspec.structs.replace(GEMMA4, max_pixels=most * 48**2)
    if max(width, height) > 200 * min(width, height):
        return
    high, wide = get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
    assert card.grid(width, height) == (1, high // 16, wide // 16)
    assert high * wide <= card.most_seen_pixels
    assert card.form.tokens(card.grid(width, height)) <= card.most_tokens


def cut(pixels: np.ndarray, card: VisionCard) -> tuple[np.ndarray, tuple[int, ...]]:
    """Patches of `[3, height, width]`, token by token."""
    side, patch = card.form.side, card.patch_size
    high, wide = (length // patch for length in pixels.shape[1:])
    found = pixels.reshape(3, high // side, side, patch, wide // side, side, patch)
    return found.transpose(1, 4, 2, 5, 0, 3, 6).reshape(high * wide, -1), (1, high, wide)


def assert_grid(card: VisionCard, found: Grid, wanted: tuple[int, ...]) -> None:
    assert card.form.fits(found)
    if isinstance(card.form, TiledForm):
        assert card.form.tilings[found[0] - 1] == wanted
    else:
        assert found == wanted
        assert card.form.tokens(found) == found[1] * found[2] // card.form.side**2


# Each has a near relative in the short run.
LONG = ("gemma4_unified", "pixtral12", "tiled_siglip")


@pytest.mark.parametrize(
    "card",
    [
        pytest.param(card, id=name, marks=[pytest.mark.exhaustive] * (name in LONG))
        for name, card in CARDS.items()
    ],
)
@pytest.mark.parametrize(
    ("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes]
)
def test_every_mode_is_read_as_by_transformers(kind: str, mode: str, card: VisionCard) -> None:
    sizes = ((28, 28), (57, 83), (300, 41), (3, 200), (500, 401))
    for seed, (width, height) in enumerate(sizes):
        data = written(kind, mode, width, height, seed)
        patches, grid = patches_of(data, card)
        wanted, wanted_grid = expected(data, card)
        assert_grid(card, grid, wanted_grid)
        np.testing.assert_array_equal(patches, wanted)


@pytest.mark.parametrize("pixels", [(0, 784), (0, 3000), (200_000, 0), (3136, 60_000), (900, 900)])
def test_bounds_of_a_request_are_those_of_the_processor(pixels: PixelBounds) -> None:
    """Both, or one beside the other of the file, which may be larger than the most."""
    least, most = pixels[0] or QWEN.min_pixels, pixels[1] or QWEN.max_pixels
    bounded = msgspec.structs.replace(QWEN, min_pixels=least, max_pixels=most)
    for seed, (width, height) in enumerate(((28, 28), (57, 83), (300, 41), (3, 200), (500, 401))):
        data = written("PNG", "RGB", width, height, seed)
        patches, grid = patches_of(data, QWEN, pixels)
        wanted, wanted_grid = expected(data, bounded)
        assert grid == wanted_grid
        np.testing.assert_array_equal(patches, wanted)
        if grid != QWEN.grid(width, height):
            assert "headers do not say" in str(outcome(DecodeJob(data, grid), QWEN).fault)


def test_bounds_are_within_those_of_the_files() -> None:
    for pixels in ((0, QWEN.max_pixels + 1), (QWEN.max_pixels + 1, 0), (-1, 0)):
        with pytest.raises(ValueError, match="1003520 at most"):
            QWEN.bounded(pixels)
    for card in (PIXTRAL, CLIP, TILED, GEMMA4):
        assert card.bounded((0, 0)) == card
        with pytest.raises(ValueError, match="knows no min_pixels"):
            card.bounded((0, 784))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_pictures_stand_upright(orientation: int) -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = written(kind, "RGB", 90, 61, 1, orientation)
        patches, grid = patches_of(data, QWEN)
        wanted, wanted_grid = expected(data, QWEN)
        assert grid == wanted_grid
        np.testing.assert_array_equal(patches, wanted)


ENVIRONMENTS = (Path(sys.prefix), Path(__file__).parents[3] / ".venv-clients")


def of_packages() -> list[Path]:
    """Real pictures that installed packages hold, one of each content."""
    kinds = (".png", ".jpg", ".jpeg", ".gif", ".webp")
    found = [
        path
        for folder in ENVIRONMENTS
        for path in sorted(folder.glob("lib/python*/site-packages/**/*"))
        if path.suffix.lower() in kinds
    ]
    return list({path.read_bytes(): path for path in found}.values())


@pytest.mark.exhaustive
def test_pictures_of_packages_are_read_as_by_transformers() -> None:
    read = 0
    for path in of_packages():
        data = path.read_bytes()
        try:
            head = read_picture_head(data)
            QWEN.grid(head.width, head.height)
        except ValueError:
            continue  # another format by its name, or too long and thin
        for card in (QWEN, CLIP, PIXTRAL, TILED):
            patches, grid = patches_of(data, card)
            wanted, wanted_grid = expected(data, card)
            assert_grid(card, grid, wanted_grid)
            np.testing.assert_array_equal(patches, wanted, err_msg=str(path))
        read += 1
    assert read >= 20


@pytest.mark.exhaustive
def test_many_sizes_are_read_as_by_transformers() -> None:
    generator = random.Random(0)
    for seed in range(200):
        kind = generator.choice(sorted(MODES))
        width, height = (int(2 ** generator.uniform(0, 11)) for _ in range(2))
        if max(width, height) > 200 * min(width, height):
            continue
        turned = 1 if kind == "GIF" else generator.randint(1, 8)
        data = written(kind, generator.choice(MODES[kind]), width, height, seed, turned)
        for card in (QWEN, CLIP, PIXTRAL, TILED):
            patches, grid = patches_of(data, card)
            wanted, wanted_grid = expected(data, card)
            assert_grid(card, grid, wanted_grid)
            np.testing.assert_array_equal(patches, wanted)
