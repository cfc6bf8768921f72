"""Files of a picture processor next to a model: how pictures become patches and tokens. No torch.

A step that differs from those of the processors below is refused by name.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.adapters.violations import shown
from loraplex.server.model.checkpoint.checkpoint import read_json, read_optional_json
from loraplex.server.model.checkpoint.model_files import CONFIG_FILE
from loraplex.server.protocol import PatchRule, PictureForm, VisionCard

# The second counts where the first says nothing of pictures.
FILES = ("processor_config.json", "preprocessor_config.json")
_KIND = "image_processor_type"
_SIGLIP = "SiglipImageProcessor"
_RULES: dict[str, PatchRule] = {
    "CLIPImageProcessor": "clip",
    "PixtralImageProcessor": "pixtral",
    "Qwen2VLImageProcessor": "qwen2_vl",
    _SIGLIP: "clip",
}
_FORMS = re.compile("(Fast|Pil)$")
# Steps of the processor, and what each must be where it is said.
_STEPS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,  # bicubic
}
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 1280
_CEILING = 1 << 26
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_HALF = (0.5, 0.5, 0.5)
_STD = (0.26862954, 0.26130258, 0.27577711)
# Where CLIP's file says nothing.
_CLIP_SIZE = 224
_SHORTEST = "shortest_edge"
_MOST_SHORTEST = 1024
# Of config.json: tokens around a picture, so many before its placeholder where none are said.
_AROUND = {"vision_start_token_id": 3, "vision_end_token_id": 2}

# Of Pixtral's processor: the placeholder, and the tokens behind a row and behind the last one.
_OF_ROWS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_LONGEST = "longest_edge"
_LONGEST_USUAL = 1024
_LEAST_LONGEST = 256

TokenToId = Callable[[str], int | None]


class TowerForm(NamedTuple):
    """Facts of the tower that patches must suit. columns: numbers of a patch. token_id: of the
    placeholder. form: of placeholders. pixels: a side of every picture; 0 = it takes any."""

    columns: int
    token_id: int
    form: PictureForm
    pixels: int = 0


def read_vision_card(folder: Path, tower: TowerForm, token_to_id: TokenToId) -> VisionCard:
    """The way of pictures to a model's tokens. token_to_id: of the tokenizer. Raises ValueError
    where it is not known, or is another than the tower's.
    """
    given = _given(folder)
    rule = _RULES.get(_FORMS.sub("", str(given.get(_KIND))))
    if rule is None:
        raise ValueError(f"{_KIND} {shown(given.get(_KIND))} is not known")
    for name, value in _STEPS.items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} must be {value}, got {shown(given[name])}")
    scale = given.get("rescale_factor", 1 / 255)
    if not isinstance(scale, float) or not math.isclose(scale, 1 / 255):
        raise ValueError(f"rescale_factor must be 1/255, got {shown(scale)}")
    usual = (_HALF, _HALF) if str(given[_KIND]).startswith(_SIGLIP) else (_MEAN, _STD)
    mean = _colours(given, "image_mean", usual[0])
    std = _colours(given, "image_std", usual[1])
    if not all(std):
        raise ValueError(f"image_std is out of range: {std}")
    if rule == "clip":
        sizes = _of_clip(given, tower)
    elif rule == "pixtral":
        sizes = _of_pixtral(given, read_optional_json(folder / FILES[0]), tower, token_to_id)
    else:
        sizes = _of_qwen2(given, tower, folder)
    card = VisionCard(
        rule=rule,
        mean=mean,
        std=std,
        token_id=tower.token_id,
        form=tower.form,
        **sizes,
    )
    if card.columns != tower.columns:
        raise ValueError(
            f"patches of {card.columns} numbers do not suit a tower of {tower.columns}"
        )
    return card


def _of_qwen2(given: Mapping[str, Any], tower: TowerForm, folder: Path) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `qwen2_vl`."""
    if tower.pixels:
        raise ValueError(f"{_KIND} does not suit a tower of pictures of one size")
    side = tower.form.side
    if _count(given, "merge_size", 2) != side:
        raise ValueError(f"merge_size must be {side}, as the tower's")
    config = read_json(folder / CONFIG_FILE)
    around = ((name, tower.token_id - before) for name, before in _AROUND.items())
    opens, closes = (_id(config, name, usual) for name, usual in around)
    least, most = _bounds(given)
    if not 0 < least <= most <= _CEILING:
        raise ValueError(f"sizes are out of range: {least} to {most}")
    return {
        "patch_size": _count(given, "patch_size", 14),
        "temporal_patch_size": _count(given, "temporal_patch_size", 2),
        "min_pixels": least,
        "max_pixels": most,
        "opens_id": opens,
        "closes_id": closes,
    }


def _of_clip(given: Mapping[str, Any], tower: TowerForm) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `clip`. The tower says how large its picture is. SigLIP's
    processor crops nothing."""
    is_cropped = not str(given.get(_KIND)).startswith(_SIGLIP)
    if not tower.pixels:
        raise ValueError(f"{_KIND} needs a tower of pictures of one size")
    if bool(given.get("do_center_crop", is_cropped)) is not is_cropped:
        raise ValueError(f"do_center_crop must be {is_cropped}")
    side, patch = tower.pixels, math.isqrt(tower.columns // 3)
    square, shortest = {"height": side, "width": side}, 0
    size, crop = (given.get(name, _CLIP_SIZE) for name in ("size", "crop_size"))
    if is_cropped and crop not in (side, square):
        raise ValueError(f"crop_size must be {side}, as the tower's, got {shown(crop)}")
    if size != square:
        if not is_cropped:
            raise ValueError(f"size must be {square}, as the tower's, got {shown(size)}")
        said = size.get(_SHORTEST) if isinstance(size, Mapping) and len(size) == 1 else size
        shortest = _count({"size": said}, "size", _CLIP_SIZE)
    if shortest > _MOST_SHORTEST:
        raise ValueError(f"size must be at most {_MOST_SHORTEST}, got {shortest}")
    return {
        "patch_size": patch,
        "temporal_patch_size": 1,
        "shortest_edge": shortest,
        "crop_size": side,
    }


def _of_pixtral(
    given: Mapping[str, Any], around: Mapping[str, Any], tower: TowerForm, token_to_id: TokenToId
) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `pixtral`. around: the file of the whole processor, which
    has the last word on patches."""
    if tower.pixels:
        raise ValueError(f"{_KIND} does not suit a tower of pictures of one size")
    if given.get("do_center_crop"):
        raise ValueError("do_center_crop must be False")
    side, names = tower.form.side, {key: around.get(key, name) for key, name in _OF_ROWS.items()}
    if _count(around, "spatial_merge_size", 1) != side:
        raise ValueError(f"{FILES[0]}: spatial_merge_size must be {side}, as the tower's")
    spot, *ends = (token_to_id(str(name)) for name in names.values())
    if spot != tower.token_id:
        raise ValueError(f"image_token {shown(names['image_token'])} is another than config.json's")
    if None in ends:
        raise ValueError(f"the tokenizer has not all of {shown([*names.values()])}")
    size = given.get("size", {_LONGEST: _LONGEST_USUAL})
    if not isinstance(size, Mapping) or [*size] != [_LONGEST]:
        raise ValueError(f"size must be {_LONGEST} alone, got {shown(size)}")
    longest = _count(size, _LONGEST, _LONGEST_USUAL)
    if not _LEAST_LONGEST <= longest <= math.isqrt(_CEILING):
        raise ValueError(f"size is out of range: {longest}")
    return {
        "patch_size": _count(around, "patch_size", 16),
        "temporal_patch_size": 1,
        "longest_edge": longest,
        "row_ends": tuple(ends),
    }


def _given(folder: Path) -> Mapping[str, Any]:
    nested = read_optional_json(folder / FILES[0]).get("image_processor")
    if isinstance(nested, Mapping):
        return nested
    if not (folder / FILES[1]).exists():
        raise ValueError("the file is missing")
    return read_json(folder / FILES[1])


def _bounds(given: Mapping[str, Any]) -> tuple[int, int]:
    """The fewest and the most pixels of a resized picture; the older names go first."""
    size = given.get("size")
    size = size if isinstance(size, Mapping) else {}
    least = _count(size, _SHORTEST, _LEAST_PIXELS)
    most = _count(size, _LONGEST, _MOST_PIXELS)
    return _count(given, "min_pixels", least), _count(given, "max_pixels", most)


def _count(given: Mapping[str, Any], name: str, usual: int) -> int:
    value = given.get(name)
    if value is None:
        return usual
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive number, got {shown(value)}")
    return value


def _id(config: Mapping[str, Any], name: str, usual: int) -> int:
    value = config.get(name, usual)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be the id of a token, got {shown(value)}")
    return value


def _colours(
    given: Mapping[str, Any], name: str, usual: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = given.get(name, usual)
    numbers = [n for n in value if isinstance(n, int | float)] if isinstance(value, list) else usual
    if len(numbers) != 3:
        raise ValueError(f"{name} must be three numbers, got {shown(value)}")
    red, green, blue = map(float, numbers)
    return red, green, blue
