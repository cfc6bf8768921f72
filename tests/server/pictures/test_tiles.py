"""Pictures that are cut into tiles: patches and ids against transformers' processors."""

import io
import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from loraplex.router.api.request.pictures import placed
from loraplex.server.model.checkpoint.processor_files import (
    TileWords,
    TowerForm,
    read_idefics3,
    read_internvl,
    read_vision_card,
)
from loraplex.server.protocol import PictureForm, StretchedForm, VisionCard
from tests.router.fake_worker import make_tokenizer
from tests.server.pictures.files import MODES, written
from tests.server.pictures.test_patches import patches_of

PATCH, PIXELS = 8, 50  # of a tile, whose last pixels no patch has
FORM = StretchedForm(side=3, tile=6)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<img>", "</img>"]
TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 4)]
CUTS: dict[str, dict[str, Any]] = {
    "idefics3": {"size": {"longest_edge": 150}, "max_image_size": {"longest_edge": PIXELS}},
    "smolvlm": {"size": {"longest_edge": 170}, "max_image_size": {"longest_edge": PIXELS}},
    "whole": {
        "size": {"longest_edge": 90},
        "max_image_size": {"longest_edge": PIXELS},
        "do_image_splitting": False,
    },
    "internvl": {"size": {"height": PIXELS, "width": PIXELS}, "max_patches": 6},
    "internvl-more": {
        "size": {"height": PIXELS, "width": PIXELS},
        "min_patches": 2,
        "max_patches": 9,
    },
}


class Kind:
    """A processor of transformers, and the card of its file."""

    def __init__(self, name: str) -> None:
        made = make_tokenizer()
        made.add_special_tokens(TOKENS)
        kind: Any = PreTrainedTokenizerFast
        self.tokenizer = kind(tokenizer_object=made)
        self.token_id = made.token_to_id("<image>") or 0
        given = CUTS[name]

        def encode(text: str) -> list[int]:
            ids: list[int] = made.encode(text, add_special_tokens=False).ids
            return ids

        self.encode = encode
        words = TileWords({}, {}, self.encode)
        if name.startswith("internvl"):
            self.images: Any = GotOcr2ImageProcessorPil(**given)
            fields = read_internvl(given, FORM, PIXELS, words)
        else:
            kinds = {"smolvlm": SmolVLMImageProcessorPil}
            self.images = kinds.get(name, Idefics3ImageProcessorPil)(**given)
            fields = read_idefics3(given, FORM, PIXELS, self.token_id, words)
        colours = self.images.image_mean, self.images.image_std
        mean, std = (tuple(each) for each in colours)
        own: dict[str, Any] = {"mean": mean, "std": std, "resample": int(self.images.resample)}
        patches: dict[str, Any] = {"patch_size": PATCH, "temporal_patch_size": 1, "form": FORM}
        self.card = VisionCard(rule="stretched", token_id=self.token_id, **patches, **own, **fields)
        self.name = name

    def read(self, picture: Image.Image) -> tuple[np.ndarray, str]:
        """Tiles, float32 `[tiles, 3, PIXELS, PIXELS]`, and what comes for `<image>`."""
        length = FORM.tokens((1, FORM.tile, FORM.tile))
        if self.name.startswith("internvl"):
            made = self.images(picture, crop_to_patches=True, return_tensors="np")
            words = {"start_image_token": "<img>", "end_image_token": "</img>"}
            own: Any = SimpleNamespace(image_token="<image>", image_seq_length=length, **words)
            return made["pixel_values"], InternVLProcessor.replace_image_token(own, made, 0)
        made = self.images(picture, return_tensors="np", return_row_col_info=True)
        words = {"fake_image_token": TOKENS[1], "global_image_tag": TOKENS[2]}
        own = SimpleNamespace(image_token="<image>", image_seq_len=length, **words)
        return made["pixel_values"][0], Idefics3Processor.replace_image_token(own, made, 0)


@cache
def kind_of(name: str) -> Kind:
    return Kind(name)


def assert_same(kind: Kind, data: bytes) -> None:
    patches, grid = patches_of(data, kind.card)
    tiles, text = kind.read(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    side, high = FORM.tile, FORM.tile // FORM.side
    seen = tiles[:, :, : side * PATCH, : side * PATCH]
    # Tiles, rows and columns of tokens, rows and columns of a token's patches, colours, pixels.
    cut = seen.reshape(len(tiles), 3, high, FORM.side, PATCH, high, FORM.side, PATCH)
    wanted = cut.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(patches), -1)
    np.testing.assert_array_equal(patches, wanted)
    assert FORM.fits(grid)
    assert (FORM.tiles(grid), FORM.patches(grid)) == (len(tiles), len(patches))
    own = kind.card.ids(grid)
    ids, _, ((start, length),) = placed([7, kind.token_id, 8], [], [own], kind.card)
    assert ids == [7, *kind.tokenizer(text, add_special_tokens=False)["input_ids"], 8]
    assert ids[start] == ids[start + length - 1] == kind.token_id
    assert ids.count(kind.token_id) == FORM.tokens(grid)
    assert len(tiles) * PIXELS**2 <= kind.card.most_seen_pixels
    assert FORM.tokens(grid) <= kind.card.most_tokens


@pytest.mark.parametrize("name", CUTS)
def test_tiles_are_those_of_transformers(name: str) -> None:
    sizes = ((28, 28), (57, 83), (300, 41), (3, 200), (50, 50), (15, 12), (500, 401), (1, 9))
    modes = [(kind, mode) for kind, modes in MODES.items() for mode in modes]
    for seed, (width, height) in enumerate(sizes):
        kind, mode = modes[seed * 5 % len(modes)]
        assert_same(kind_of(name), written(kind, mode, width, height, seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CUTS)
def test_many_pictures_are_cut_as_by_transformers(name: str) -> None:
    generator, kind = random.Random(0), kind_of(name)
    modes = [(kind, mode) for kind, modes in MODES.items() for mode in modes]
    for seed in range(300):
        width, height = (int(2 ** generator.uniform(0, 10)) for _ in range(2))
        if max(width, height) <= 200 * min(width, height):
            form, mode = modes[seed % len(modes)]
            assert_same(kind, written(form, mode, width, height, seed))


@pytest.mark.parametrize("name", ["internvl", "internvl-more"])
def test_sizes_alone_give_tiles(name: str) -> None:
    """Idefics3's processor counts its tiles otherwise than it cuts them."""
    kind = kind_of(name)
    for width in range(1, 420, 7):
        for height in range(1 + width // 200, min(420, 200 * width), 11):
            options = {"crop_to_patches": True}
            counted = kind.images.get_number_of_image_patches(height, width, options)
            assert FORM.tiles(kind.card.grid(width, height)) == counted


def words(**tokens: str) -> TileWords:
    return TileWords({"image_seq_len": 4, "image_seq_length": 4}, tokens, kind_of("whole").encode)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"size": {"longest_edge": 5000}}, "size must be at most 4096, got 5000"),
        ({"size": {"longest_edge": 600}}, "at most 100 tiles are served, got 144"),
        ({"size": {"height": 50, "width": 50}}, "size must be longest_edge alone"),
        ({"max_image_size": {"longest_edge": 60}}, "max_image_size must be 50, as the tower's"),
        ({"max_image_size": {"longest_edge": "50"}}, "max_image_size must be longest_edge alone"),
    ],
)
def test_tiles_of_idefics3_that_are_not_served(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_idefics3({**CUTS["idefics3"], **changes}, FORM, PIXELS, 258, words())


def test_names_of_tokens_are_the_tokenizers() -> None:
    given, token_id = CUTS["idefics3"], kind_of("whole").token_id
    named = {"fake_image_token": "<img>", "global_image_token": "all:"}
    found = read_idefics3(given, FORM, PIXELS, token_id, words(**named))
    encode = kind_of("whole").encode
    assert (found["before"], found["after"]) == (tuple(encode("<img>all:")), tuple(encode("<img>")))
    with pytest.raises(ValueError, match="no token <pic> of the id"):
        read_idefics3(given, FORM, PIXELS, token_id, words(image_token="<pic>"))
    wrong = words()._replace(whole={"image_seq_len": 5})
    with pytest.raises(ValueError, match="image_seq_len must be 4, as the tower's, got 5"):
        read_idefics3(given, FORM, PIXELS, token_id, wrong)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"size": {"height": 60, "width": 60}}, "as the tower's, got {'height': 60"),
        ({"max_patches": 101}, "must be from 1 to 100"),
        ({"min_patches": 0}, "must be from 1 to 100"),
    ],
)
def test_tiles_of_internvl_that_are_not_served(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_internvl({**CUTS["internvl"], **changes}, FORM, PIXELS, words())


@pytest.mark.parametrize(
    ("kind", "made", "pixels"),
    [
        ("Idefics3ImageProcessor", Idefics3ImageProcessorPil, 364),
        ("SmolVLMImageProcessorFast", SmolVLMImageProcessorPil, 364),
        ("GotOcr2ImageProcessorFast", GotOcr2ImageProcessorPil, 384),
    ],
)
def test_a_file_that_says_little_means_what_the_class_says(
    kind: str, made: Any, pixels: int, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "image_processor_type": kind,
        "size": None,
        "crop_size": None,
        "resample": None,
    }
    if "Got" in kind:  # of whose class no model of tiles has the size
        given["size"] = {"height": pixels, "width": pixels}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"image_token": "<image>"}))
    of = kind_of("whole")
    tower = TowerForm(3 * 14**2, of.token_id, StretchedForm(side=2, tile=26), pixels)
    card = read_vision_card(tmp_path, tower, lambda _: None, of.encode)
    processor = made()
    assert (card.mean, card.std) == (tuple(processor.image_mean), tuple(processor.image_std))
    assert (card.resample, card.patch_size) == (processor.resample, 14)
    assert card.tiles is not None
    assert (card.tiles.size, card.tiles.most) == (pixels, 12 if "Got" in kind else 16)
    whole = TowerForm(3 * 14**2, of.token_id, PictureForm(side=2, tile=26), pixels)
    with pytest.raises(ValueError, match="does not suit the tower"):
        read_vision_card(tmp_path, whole, lambda _: None, of.encode)
