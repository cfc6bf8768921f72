"""Files of a picture processor next to a model: how pictures become patches and tokens. No torch.

A step that differs from Qwen2-VL's processor is refused by name.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.adapters.violations import shown
from loraplex.server.model.checkpoint.checkpoint import read_json, read_optional_json
from loraplex.server.model.checkpoint.model_files import CONFIG_FILE
from loraplex.server.protocol import VisionCard

# The second counts where the first says nothing of pictures.
FILES = ("processor_config.json", "preprocessor_config.json")
_KIND = "image_processor_type"
_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# Steps of the processor, and what each must be.
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
_STD = (0.26862954, 0.26130258, 0.27577711)
# Of config.json: tokens around a picture.
_AROUND = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}


class TowerForm(NamedTuple):
    """Facts of the tower that patches must suit. columns: numbers of a patch. side: of the square
    of patches that becomes one token. token_id: of the placeholder."""

    columns: int
    side: int
    token_id: int


def read_vision_card(folder: Path, tower: TowerForm) -> VisionCard:
    """The way of pictures to a model's tokens. Raises ValueError where it is not known, or is
    another than the tower's.
    """
    given = _given(folder)
    if given.get(_KIND) not in _KINDS:
        raise ValueError(f"{_KIND} {shown(given.get(_KIND))} is not known")
    for name, value in _STEPS.items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} must be {value}, got {shown(given[name])}")
    scale = given.get("rescale_factor", 1 / 255)
    if not isinstance(scale, float) or not math.isclose(scale, 1 / 255):
        raise ValueError(f"rescale_factor must be 1/255, got {shown(scale)}")
    config = read_json(folder / CONFIG_FILE)
    opens, closes = (_id(config, name, usual) for name, usual in _AROUND.items())
    least, most = _bounds(given)
    card = VisionCard(
        rule="qwen2_vl",
        patch_size=_count(given, "patch_size", 14),
        temporal_patch_size=_count(given, "temporal_patch_size", 2),
        merge_size=_count(given, "merge_size", 2),
        min_pixels=least,
        max_pixels=most,
        mean=_colours(given, "image_mean", _MEAN),
        std=_colours(given, "image_std", _STD),
        token_id=tower.token_id,
        opens_id=opens,
        closes_id=closes,
    )
    if (card.columns, card.merge_size) != (tower.columns, tower.side):
        raise ValueError(
            f"patches of {card.columns} numbers, {card.merge_size} x {card.merge_size} of them a "
            f"token, do not suit a tower of {tower.columns} and {tower.side} x {tower.side}"
        )
    if not all(card.std) or not 0 < least <= most <= _CEILING:
        raise ValueError(f"image_std or sizes are out of range: {card.std}, {least} to {most}")
    return card


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
    least = _count(size, "shortest_edge", _LEAST_PIXELS)
    most = _count(size, "longest_edge", _MOST_PIXELS)
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
