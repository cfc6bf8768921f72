"""Vision cards against transformers' reading of the same files."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.pixtral import image_processing_pil_pixtral as pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from loraplex.server.model.card import model_card
from loraplex.server.model.checkpoint.processor_files import TowerForm, read_vision_card
from loraplex.server.protocol import ModelCard, PictureForm, TiledForm, VisionCard
from tests.e2e.picture_model import IMAGE, SIZE, save_all
from tests.server.model.hub_models import SIZES as TEXT_SIZES

IDS = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
NAMES = ("image_token", "image_break_token", "image_end_token")
TOWER = TowerForm(1176, 248056, PictureForm(side=2))
KIND = {"image_processor_type": "Qwen2VLImageProcessor"}


def written(folder: Path, given: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / "config.json").write_text(json.dumps({"vision_start_token_id": 5}))
    (folder / name).write_text(json.dumps(given))
    return folder


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_std": [0.5, 0.5, 0.5]},
        {"min_pixels": 3136, "max_pixels": 12845056},
        {"size": {"shortest_edge": 1000, "longest_edge": 90000}},
        {"size": {"shortest_edge": 1000, "longest_edge": 90000}, "max_pixels": 80000},
        {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 1]},
    ],
)
def test_numbers_are_those_of_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    card = read_vision_card(written(tmp_path, KIND | given), TOWER, IDS.get)
    processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    size = processor.size
    assert (card.min_pixels, card.max_pixels) == (size["shortest_edge"], size["longest_edge"])
    assert (list(card.mean), list(card.std)) == (
        list(processor.image_mean),
        list(processor.image_std),
    )
    assert (card.patch_size, card.form.side) == (processor.patch_size, processor.merge_size)
    assert card.temporal_patch_size == processor.temporal_patch_size
    assert (card.opens_id, card.token_id, card.closes_id) == (5, 248056, 248054)


TILES = TiledForm(tile=24, tilings=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)))
CLIP_TOWER = TowerForm(3 * 14 * 14, 7, PictureForm(tile=24), 336)
CLIP_KIND = {"image_processor_type": "CLIPImageProcessor"}
SIGLIP_KIND = {"image_processor_type": "SiglipImageProcessor"}
SQUARE = {"height": 336, "width": 336}


@pytest.mark.parametrize(
    ("given", "shortest"),
    [
        ({"crop_size": SQUARE}, 224),
        ({"crop_size": 336, "size": 400}, 400),
        ({"crop_size": 336, "size": SQUARE}, 0),
        ({"crop_size": SQUARE, "size": {"shortest_edge": 336}}, 336),
    ],
)
def test_pictures_of_one_size(tmp_path: Path, given: dict[str, Any], shortest: int) -> None:
    card = read_vision_card(written(tmp_path, CLIP_KIND | given), CLIP_TOWER, IDS.get)
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path)
    assert card.shortest_edge == shortest
    assert processor.size["shortest_edge" if shortest else "height"] == (shortest or 336)
    assert processor.crop_size["height"] == card.crop_size == 336
    assert (list(card.mean), list(card.std)) == (
        list(processor.image_mean),
        list(processor.image_std),
    )
    assert card.place == (7,)
    assert card.grid(9, 90) == (1, 24, 24)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"crop_size": 224}, "crop_size must be 336"),
        ({"crop_size": {"height": 336, "width": 224}}, "crop_size must be 336"),
        ({"crop_size": 336, "size": {"height": 3, "width": 3}}, "size must be a positive number"),
        ({"crop_size": 336, "size": 5000}, "size must be at most 1024"),
        ({"crop_size": 336, "do_center_crop": False}, "do_center_crop must be True"),
        (SIGLIP_KIND, "size must be .*336"),
        (SIGLIP_KIND | {"size": SQUARE, "do_center_crop": True}, "do_center_crop must be False"),
        (KIND, "pictures of one size"),
    ],
)
def test_other_sizes_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_vision_card(written(tmp_path, CLIP_KIND | given), CLIP_TOWER, IDS.get)


TILED_TOWER = TowerForm(3 * 14 * 14, 7, TILES, 336)
PADDED = [[336 * high, 336 * wide] for high, wide in TILES.tilings]
TILED_KIND = {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PADDED}
TILED_SIZES = {"size": {"shortest_edge": 336}, "crop_size": SQUARE}


@pytest.mark.parametrize("given", [TILED_SIZES, {"size": SQUARE, "crop_size": 336}])
def test_pictures_in_tiles(tmp_path: Path, given: dict[str, Any]) -> None:
    card = read_vision_card(written(tmp_path, TILED_KIND | given), TILED_TOWER, IDS.get)
    processor = LlavaNextImageProcessorPil.from_pretrained(tmp_path)
    assert card.crop_size == processor.crop_size["height"]
    assert (card.form, card.patch_size) == (TILES, 14)
    assert list(card.mean) == list(processor.image_mean)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image_grid_pinpoints": PADDED[:2]}, "image_grid_pinpoints must be .*336, 672"),
        ({"crop_size": 224}, "crop_size must be 336"),
        ({"size": {"shortest_edge": 224}}, "size must be 336"),
        ({"image_processor_type": "CLIPImageProcessor"}, "does not suit the tower"),
    ],
)
def test_other_tiles_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    files = written(tmp_path, TILED_KIND | TILED_SIZES | given)
    with pytest.raises(ValueError, match=words):
        read_vision_card(files, TILED_TOWER, IDS.get)


ROWS_TOWER = TowerForm(3 * 14 * 14, 10, PictureForm(side=2))
ROWS_KIND = {"image_processor_type": "PixtralImageProcessorFast"}
AROUND = {"patch_size": 14, "spatial_merge_size": 2}


def of_rows(folder: Path, given: dict[str, Any], around: dict[str, Any]) -> VisionCard:
    written(folder, {**AROUND, **around}, "processor_config.json")
    return read_vision_card(written(folder, ROWS_KIND | given), ROWS_TOWER, IDS.get)


@pytest.mark.parametrize("given", [{}, {"size": {"longest_edge": 1540}, "patch_size": 14}])
def test_pictures_with_ends_of_rows(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = of_rows(tmp_path, given, {})
    processor = PixtralImageProcessorPil.from_pretrained(tmp_path)
    assert card.longest_edge == processor.size["longest_edge"]
    assert (list(card.mean), list(card.std)) == (
        list(processor.image_mean),
        list(processor.image_std),
    )
    # Without torchvision transformers can read neither.
    monkeypatch.setitem(
        sys.modules, f"{pil_pixtral.__package__}.image_processing_pixtral", pil_pixtral
    )
    place = importlib.import_module(
        f"{pil_pixtral.__package__}.processing_pixtral"
    ).PixtralProcessor
    names = SimpleNamespace(
        **AROUND, **{name: f"{key} " for key, name in zip(IDS, NAMES, strict=True)}
    )
    for grid in ((1, 2, 2), (1, 8, 6), (1, 2, 10)):
        sizes = {"image_sizes": [[14 * patches for patches in grid[1:]]]}
        text = place.replace_image_token(names, sizes, 0)
        assert card.ids(grid) == [IDS[token] for token in text.split()]


@pytest.mark.parametrize(
    ("given", "around", "words"),
    [
        ({"size": {"height": 300, "width": 400}}, {}, "size must be longest_edge alone"),
        ({"size": 300}, {}, "size must be longest_edge alone"),
        ({"size": {"longest_edge": 100}}, {}, "size is out of range"),
        ({"do_center_crop": True}, {}, "do_center_crop must be False"),
        ({}, {"spatial_merge_size": 1}, "spatial_merge_size must be 2"),
        ({}, {"patch_size": 16}, "patches of 768 numbers do not suit"),
        ({}, {"image_token": "[IMG_END]"}, "another than config.json's"),
        ({}, {"image_break_token": "[ROW]"}, "the tokenizer has not all of"),
    ],
)
def test_other_rows_are_refused(
    tmp_path: Path, given: dict[str, Any], around: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        of_rows(tmp_path, given, around)


GEMMA_TOWER = TowerForm(3 * 14 * 14, 7, PictureForm(side=4, tile=64), 896)
# The file of google/gemma-3-4b-it.
GEMMA_KIND = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}


def test_gemma_puts_empty_lines_around_pictures(tmp_path: Path) -> None:
    card = read_vision_card(written(tmp_path, GEMMA_KIND), GEMMA_TOWER, IDS.get)
    assert (card.resample, card.crop_size, card.spot, card.around) == (2, 896, 255999, "\n\n")
    assert card.ids(card.grid(30, 50)) == [255999, *[7] * 256, 256000]
    assert card.place == (255999,)
    written(tmp_path, {"image_seq_length": 64}, "processor_config.json")
    with pytest.raises(ValueError, match="image_seq_length must be 256"):
        read_vision_card(tmp_path, GEMMA_TOWER, IDS.get)


GEMMA4_TOWER = TowerForm(3 * 16 * 16, 258880, PictureForm(side=3))
GEMMA4_KIND = {
    "image_processor_type": "Gemma4ImageProcessor",
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
}


def test_gemma4_has_as_many_tokens_as_a_picture_fills(tmp_path: Path) -> None:
    card = read_vision_card(written(tmp_path, GEMMA4_KIND), GEMMA4_TOWER, IDS.get)
    assert (card.mean, card.std, card.colours_last) == ((0.5,) * 3, (0.5,) * 3, True)
    assert card.grid(640, 480) == (1, 42, 57)
    assert card.ids(card.grid(640, 480)) == [255999, *[258880] * 266, 258882]


def test_patches_of_gemma4_of_one_tower_are_tokens(tmp_path: Path) -> None:
    tower = TowerForm(3 * 48 * 48, 258880, PictureForm(side=1))
    given = GEMMA4_KIND | {"image_processor_type": "Gemma4UnifiedImageProcessor"}
    card = read_vision_card(written(tmp_path, given), tower, IDS.get)
    assert (card.mean, card.std, card.patch_size) == ((0.0,) * 3, (1.0,) * 3, 48)
    assert card.grid(640, 480) == (1, 14, 19)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"do_normalize": True}, "do_normalize must be False"),
        ({"max_soft_tokens": 100}, "max_soft_tokens must be one of"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size must be 3"),
        ({"patch_size": 14}, "do not suit a tower"),
    ],
)
def test_other_steps_of_gemma4_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_vision_card(written(tmp_path, GEMMA4_KIND | changes), GEMMA4_TOWER, IDS.get)


def test_the_nested_file_goes_first(tmp_path: Path) -> None:
    written(tmp_path, KIND | {"max_pixels": 4000})
    written(tmp_path, {"image_processor": KIND | {"max_pixels": 5000}}, "processor_config.json")
    assert read_vision_card(tmp_path, TOWER, IDS.get).max_pixels == 5000
    written(tmp_path, {"processor_class": "Qwen2_5_VLProcessor"}, "processor_config.json")
    assert read_vision_card(tmp_path, TOWER, IDS.get).max_pixels == 4000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image_processor_type": "OtherProcessor"}, "OtherProcessor.* is not known"),
        ({"image_processor_type": "CLIPImageProcessor"}, "tower of pictures of one size"),
        (KIND | {"do_rescale": False}, "do_rescale must be True"),
        (KIND | {"resample": 6}, "resample must be a filter of Pillow"),
        (KIND | {"do_pan_and_scan": True}, "do_pan_and_scan must be False"),
        (KIND | {"rescale_factor": 1.0}, "rescale_factor must be 1/255"),
        (KIND | {"patch_size": 16}, "do not suit a tower"),
        (KIND | {"patch_size": "14"}, "patch_size must be a positive number"),
        (KIND | {"image_std": [0, 1, 1]}, "out of range"),
        (KIND | {"image_mean": [0, 1]}, "three numbers"),
        (KIND | {"min_pixels": 9000, "max_pixels": 8000}, "out of range"),
    ],
)
def test_what_differs_is_refused_by_name(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_vision_card(written(tmp_path, given), TOWER, IDS.get)


def test_a_model_without_the_file_has_no_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="missing"):
        read_vision_card(tmp_path, TOWER, IDS.get)


def card_of(folder: Path) -> ModelCard:
    return model_card(folder, names=("m",), dtype="float32", device="cpu", max_lora_rank=8)


@pytest.mark.filterwarnings("ignore")
def test_a_model_card_says_how_pictures_are_read_or_why_not(tmp_path: Path) -> None:
    save_all(tmp_path)
    card = card_of(tmp_path / "base")
    assert card.vision is not None
    assert (card.vision.token_id, card.vision.max_pixels) == (IMAGE, SIZE["longest_edge"])
    assert not card.remarks
    (tmp_path / "base" / "preprocessor_config.json").unlink()
    blind = card_of(tmp_path / "base")
    assert blind.vision is None
    assert blind.blind == "preprocessor_config.json: the file is missing"
    assert blind.remarks == (f"{blind.blind}; images are refused",)
    config = {"model_type": "vipllava", "architectures": ["VipLlavaForConditionalGeneration"]}
    text = {"text_config": {**TEXT_SIZES, "vocab_size": 264, "model_type": "llama"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, **text}))
    assert card_of(tmp_path / "base").blind == "of vipllava the text part is served"


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_the_text_part_alone_has_no_way_for_pictures(tmp_path: Path) -> None:
    save_all(tmp_path)
    path = tmp_path / "base" / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if "visual" not in name}
    save_file(tensors, path)
    card = card_of(tmp_path / "base")
    assert (card.vision, card.blind) == (None, "the checkpoint has the text part alone")
    assert not card.remarks
