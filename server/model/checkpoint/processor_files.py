"""Files of a picture processor next to a model: how pictures become patches and tokens. No torch.

A step that differs from those of the processors below is refused by name.
"""

import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.adapters.errors import shown
from loraplex.adapters.peft.files import special_tokens
from loraplex.server.model.checkpoint.checkpoint import read_json, read_optional_json
from loraplex.server.model.checkpoint.model_files import CONFIG_FILE
from loraplex.server.protocol import (
    AnyForm,
    PatchRule,
    PictureForm,
    StretchedForm,
    TiledForm,
    TileRule,
    VisionCard,
)

# What Idefics3's processor makes no picture longer than.
_MOST_LONGEST = 4096
_MOST_TILES = 100
_IDEFICS3_EDGE = 364

# The second counts where the first says nothing of pictures.
FILES = ("processor_config.json", "preprocessor_config.json")
_KIND = "image_processor_type"
Colours = tuple[float, float, float]
_FORMS = re.compile("(Fast|Pil)$")
# Steps of the processor, and what each must be where it is said.
_STEPS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_pan_and_scan": False,
}
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 1280
_CEILING = 1 << 26
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_HALF = (0.5, 0.5, 0.5)
_STD = (0.26862954, 0.26130258, 0.27577711)
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
_MOST_RESAMPLE = 5

_GEMMA3 = "Gemma3ImageProcessor"
_UNIFIED = "Gemma4UnifiedImageProcessor"
_INTERNVL = "GotOcr2ImageProcessor"


class TileWords(NamedTuple):
    """Words that a processor writes for tiles. whole: its own file, which says more than of
    pictures. tokens: special ones by their names. encode: a text to ids, without tokens around it.
    """

    whole: Mapping[str, Any]
    tokens: Mapping[str, str | None]
    encode: Callable[[str], list[int]]

    def ids(self, name: str, usual: str) -> tuple[int, ...]:
        """Ids of a special token."""
        return tuple(self.encode(self.token(name, usual)))

    def token(self, name: str, usual: str) -> str:
        """A special token."""
        return self.tokens.get(name) or usual


def check_length(whole: Mapping[str, Any], key: str, form: AnyForm) -> None:
    """Check how many placeholders a processor's own file has for a tile, or for a picture of that
    size. Raises ValueError."""
    tokens = form.tokens((1, form.tile, form.tile))
    length = whole.get(key, tokens)
    if length != tokens:
        raise ValueError(f"{key} must be {tokens}, as the tower's, got {shown(length)}")


def read_idefics3(
    given: Mapping[str, Any], form: AnyForm, pixels: int, token_id: int, words: TileWords
) -> dict[str, Any]:
    """Fields of a VisionCard. pixels: a side of a tile. token_id: of the placeholder. Raises
    ValueError."""
    check_length(words.whole, "image_seq_len", form)
    longest = _edge(given, "size", 4 * _IDEFICS3_EDGE)
    size = _edge(given, "max_image_size", _IDEFICS3_EDGE)
    if size != pixels:
        raise ValueError(f"max_image_size must be {pixels}, as the tower's, got {size}")
    if longest > _MOST_LONGEST:
        raise ValueError(f"size must be at most {_MOST_LONGEST}, got {longest}")
    side = -(-longest // size) if given.get("do_image_splitting", True) else 1
    if side**2 > _MOST_TILES:
        raise ValueError(f"size: at most {_MOST_TILES} tiles are served, got {side**2}")
    around = words.token("fake_image_token", "<fake_token_around_image>")
    whole = around + words.token("global_image_token", "<global-img>")
    place = words.token("image_token", "<image>")
    numbers = range(1, side + 1)
    rows = ([f"{around}<row_{row}_col_{column}>" for column in numbers] for row in numbers)
    tiles = "\n".join("".join(f"{tile}{place}" for tile in row) for row in rows)
    ids = words.encode(f"{tiles}\n\n{whole}{place}")
    ends = [-1, *(number for number, each in enumerate(ids) if each == token_id)]
    *own, behind = [tuple(ids[begin + 1 : end]) for begin, end in pairwise(ends)] or [()]
    if len(own) != side**2:
        raise ValueError(f"the tokenizer has no token {place} of the id {token_id}")
    by_row = tuple(tuple(own[row * side : (row + 1) * side]) for row in range(side))
    return {
        "tiles": TileRule(size, 1, side**2, longest, by_row, behind),
        "before": tuple(words.encode(whole)),
        "after": tuple(words.encode(around)),
    }


def read_internvl(
    given: Mapping[str, Any], form: AnyForm, pixels: int, words: TileWords
) -> dict[str, Any]:
    """Fields of a VisionCard, as of `read_idefics3`. The model's processor has pictures cut,
    whatever `crop_to_patches` says."""
    check_length(words.whole, "image_seq_length", form)
    square = {"height": pixels, "width": pixels}
    if given.get("size") != square:
        raise ValueError(f"size must be {square}, as the tower's, got {shown(given.get('size'))}")
    least, most = given.get("min_patches", 1), given.get("max_patches", 12)
    if not all(type(n) is int and 0 < n <= _MOST_TILES for n in (least, most)):
        raise ValueError(f"min_patches and max_patches must be from 1 to {_MOST_TILES}")
    return {
        "tiles": TileRule(pixels, least, most),
        "before": words.ids("start_image_token", "<img>"),
        "after": words.ids("end_image_token", "</img>"),
    }


def _edge(given: Mapping[str, Any], name: str, usual: int) -> int:
    value = given.get(name, {_LONGEST: usual})
    edge = value.get(_LONGEST) if isinstance(value, Mapping) and len(value) == 1 else None
    if type(edge) is not int or edge < 1:
        raise ValueError(f"{name} must be {_LONGEST} alone, a positive number: {shown(value)}")
    return edge


class _Processor(NamedTuple):
    """A kind of processor, and what it does where its file says nothing. colours: mean and
    deviation. crops: it takes the middle of a picture. normalises: else the model does, by these
    colours."""

    rule: PatchRule
    colours: tuple[Colours, Colours] = (_MEAN, _STD)
    resample: int = _BICUBIC
    crops: bool = False
    normalises: bool = True


_PROCESSORS = {
    "CLIPImageProcessor": _Processor("clip", crops=True),
    _GEMMA3: _Processor("clip", (_HALF, _HALF), _BILINEAR),
    "Gemma4ImageProcessor": _Processor("gemma4", (_HALF, _HALF), normalises=False),
    _UNIFIED: _Processor("gemma4", ((0.0,) * 3, (1.0,) * 3), normalises=False),
    _INTERNVL: _Processor("stretched"),
    "Idefics3ImageProcessor": _Processor("stretched", (_HALF, _HALF), _LANCZOS),
    "LlavaNextImageProcessor": _Processor("llava_next"),
    "PixtralImageProcessor": _Processor("pixtral"),
    "Qwen2VLImageProcessor": _Processor("qwen2_vl"),
    "SiglipImageProcessor": _Processor("clip", (_HALF, _HALF)),
    "SmolVLMImageProcessor": _Processor("stretched", (_HALF, _HALF), _LANCZOS),
}
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
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
_PADDED = "image_grid_pinpoints"
_LONGEST = "longest_edge"
_LONGEST_USUAL = 1024
_LEAST_LONGEST = 256

TokenToId = Callable[[str], int | None]
Encode = Callable[[str], list[int]]


class TowerForm(NamedTuple):
    """Facts of the tower that patches must suit. columns: numbers of a patch. token_id: of the
    placeholder. form: of placeholders. pixels: a side of every picture; 0 = it takes any."""

    columns: int
    token_id: int
    form: AnyForm
    pixels: int = 0


def read_vision_card(
    folder: Path, tower: TowerForm, token_to_id: TokenToId, encode: Encode = lambda text: []
) -> VisionCard:
    """The way of pictures to a model's tokens. token_to_id, encode: of the tokenizer, which puts
    nothing around a text; StretchedForms alone need `encode`. Raises ValueError where it is not
    known, or is another than the tower's.
    """
    given = _given(folder)
    processor = _PROCESSORS.get(_kind(given))
    if processor is None:
        raise ValueError(f"{_KIND} {shown(given.get(_KIND))} is not known")
    for name, value in (_STEPS | {"do_normalize": processor.normalises}).items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} must be {value}, got {shown(given[name])}")
    scale = given.get("rescale_factor", 1 / 255)
    if not isinstance(scale, float) or not math.isclose(scale, 1 / 255):
        raise ValueError(f"rescale_factor must be 1/255, got {shown(scale)}")
    mean, std = (
        _colours(given if processor.normalises else {}, name, usual)
        for name, usual in zip(("image_mean", "image_std"), processor.colours, strict=True)
    )
    resample = given.get("resample", processor.resample)
    if type(resample) is not int or not 0 <= resample <= _MOST_RESAMPLE:
        raise ValueError(f"resample must be a filter of Pillow, got {shown(resample)}")
    if not all(std):
        raise ValueError(f"image_std is out of range: {std}")
    # Where files do not say them, patches are squares of one frame that suit the tower.
    patches = {"patch_size": math.isqrt(tower.columns // 3), "temporal_patch_size": 1}
    card = VisionCard(
        rule=processor.rule,
        resample=resample,
        mean=mean,
        std=std,
        token_id=tower.token_id,
        form=tower.form,
        **patches | _sizes(processor.rule, _Files(folder, given, tower, token_to_id, encode)),
    )
    if card.columns != tower.columns:
        raise ValueError(
            f"patches of {card.columns} numbers do not suit a tower of {tower.columns}"
        )
    return card


class _Files(NamedTuple):
    """Files of a processor, to be read. given: what its files say of pictures. token_to_id,
    encode: of the tokenizer."""

    folder: Path
    given: Mapping[str, Any]
    tower: TowerForm
    token_to_id: TokenToId
    encode: Encode

    def whole(self) -> Mapping[str, Any]:
        """The file of the whole processor, which says more than of pictures."""
        return read_optional_json(self.folder / FILES[0])

    def config(self) -> Mapping[str, Any]:
        return read_json(self.folder / CONFIG_FILE)


def _sizes(rule: PatchRule, files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard that not all rules have."""
    form, read = _READERS[rule]
    if type(files.tower.form) is not form:
        raise ValueError(f"{_KIND} {shown(files.given[_KIND])} does not suit the tower")
    return read(files)


def _check_any_size(tower: TowerForm) -> None:
    if tower.pixels:
        raise ValueError(f"{_KIND} does not suit a tower of pictures of one size")


def _of_stretched(files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `stretched`."""
    tower, given = files.tower, files.given
    named = special_tokens(read_optional_json(files.folder / "tokenizer_config.json"))
    words = TileWords(files.whole(), named, files.encode)
    if _kind(given) == _INTERNVL:
        return read_internvl(given, tower.form, tower.pixels, words)
    return read_idefics3(given, tower.form, tower.pixels, tower.token_id, words)


def _of_qwen2(files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `qwen2_vl`."""
    given, tower = files.given, files.tower
    _check_any_size(tower)
    side = tower.form.side
    if _count(given, "merge_size", 2) != side:
        raise ValueError(f"merge_size must be {side}, as the tower's")
    config = files.config()
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


def _of_gemma4(files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `gemma4`."""
    given, config, side = files.given, files.config(), files.tower.form.side
    _check_any_size(files.tower)
    patch, pooled = _count(given, "patch_size", 16), _count(given, "pooling_kernel_size", 3)
    if _kind(given) == _UNIFIED:  # its patches are as large as a token
        patch, pooled = patch * pooled, 1
    if pooled != side:
        raise ValueError(f"pooling_kernel_size must be {side}, as the tower's")
    most = _count(given, "max_soft_tokens", 280)
    if most not in _SOFT_TOKENS:
        raise ValueError(f"max_soft_tokens must be one of {_SOFT_TOKENS}, got {most}")
    return {
        "patch_size": patch,
        "max_pixels": most * (side * patch) ** 2,
        "before": (_id(config, "boi_token_id", 255999),),
        "after": (_id(config, "eoi_token_id", 258882),),
        "colours_last": True,
    }


def _of_gemma3(files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard. Templates write the token that opens a picture, and the processor
    puts empty lines around it."""
    config = files.config()
    opens, closes = (
        _id(config, name, _id(config, name.replace("index", "id"), usual))
        for name, usual in (("boi_token_index", 255999), ("eoi_token_index", 256000))
    )
    check_length(files.whole(), "image_seq_length", files.tower.form)
    return {"spot_id": opens, "before": (opens,), "after": (closes,), "around": "\n\n"}


def _kind(given: Mapping[str, Any]) -> str:
    """The kind of processor, however it computes."""
    return _FORMS.sub("", str(given.get(_KIND)))


def _of_clip(files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `clip`. The tower says how large its picture is."""
    given, tower = files.given, files.tower
    crops = _PROCESSORS[_kind(given)].crops
    if not tower.pixels:
        raise ValueError(f"{_KIND} needs a tower of pictures of one size")
    if bool(given.get("do_center_crop", crops)) is not crops:
        raise ValueError(f"do_center_crop must be {crops}")
    side = tower.pixels
    square, shortest = {"height": side, "width": side}, 0
    size = given.get("size", _CLIP_SIZE)
    if crops:
        _check_crop(given, side)
    if size != square:
        if not crops:
            raise ValueError(f"size must be {square}, as the tower's, got {shown(size)}")
        said = size.get(_SHORTEST) if isinstance(size, Mapping) and len(size) == 1 else size
        shortest = _count({"size": said}, "size", _CLIP_SIZE)
    if shortest > _MOST_SHORTEST:
        raise ValueError(f"size must be at most {_MOST_SHORTEST}, got {shortest}")
    return {
        "shortest_edge": shortest,
        "crop_size": side,
        **(_of_gemma3(files) if _kind(given) == _GEMMA3 else {}),
    }


def _of_tiles(files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard of tiles. Both files name the sizes of padded pictures."""
    given, form, side = files.given, files.tower.form, files.tower.pixels
    assert isinstance(form, TiledForm)
    square = {"height": side, "width": side}
    if given.get("size", _CLIP_SIZE) not in (side, square, {_SHORTEST: side}):
        raise ValueError(f"size must be {side}, as the tower's, got {shown(given.get('size'))}")
    _check_crop(given, side)
    padded = [[side * high, side * wide] for high, wide in form.tilings]
    if given.get(_PADDED) != padded:
        raise ValueError(f"{_PADDED} must be {padded}, got {shown(given.get(_PADDED))}")
    return {"crop_size": side}


def _check_crop(given: Mapping[str, Any], side: int) -> None:
    """Raise ValueError where pictures are cut to another square than the tower's."""
    crop = given.get("crop_size", _CLIP_SIZE)
    if crop not in (side, {"height": side, "width": side}):
        raise ValueError(f"crop_size must be {side}, as the tower's, got {shown(crop)}")


def _of_pixtral(files: _Files) -> dict[str, Any]:
    """Fields of a VisionCard by the rule `pixtral`. The file of the whole processor has the last
    word on patches."""
    given, around, tower = files.given, files.whole(), files.tower
    _check_any_size(tower)
    if given.get("do_center_crop"):
        raise ValueError("do_center_crop must be False")
    side, names = tower.form.side, {key: around.get(key, name) for key, name in _OF_ROWS.items()}
    if _count(around, "spatial_merge_size", 1) != side:
        raise ValueError(f"{FILES[0]}: spatial_merge_size must be {side}, as the tower's")
    spot, *ends = (files.token_to_id(str(name)) for name in names.values())
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
        "longest_edge": longest,
        "row_ends": tuple(ends),
    }


_Reader = Callable[[_Files], dict[str, Any]]
_READERS: dict[PatchRule, tuple[type[PictureForm], _Reader]] = {
    "qwen2_vl": (PictureForm, _of_qwen2),
    "clip": (PictureForm, _of_clip),
    "pixtral": (PictureForm, _of_pixtral),
    "gemma4": (PictureForm, _of_gemma4),
    "llava_next": (TiledForm, _of_tiles),
    "stretched": (StretchedForm, _of_stretched),
}


def _given(folder: Path) -> Mapping[str, Any]:
    """Read what the files say; of null the class decides, as where they say nothing."""
    given = read_optional_json(folder / FILES[0]).get("image_processor")
    if not isinstance(given, Mapping):
        if not (folder / FILES[1]).exists():
            raise ValueError("the file is missing")
        given = read_json(folder / FILES[1])
    return {name: value for name, value in given.items() if value is not None}


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


def _colours(given: Mapping[str, Any], name: str, usual: Colours) -> Colours:
    value = given.get(name, usual)
    numbers = [n for n in value if isinstance(n, int | float)] if isinstance(value, list) else usual
    if len(numbers) != 3:
        raise ValueError(f"{name} must be three numbers, got {shown(value)}")
    red, green, blue = map(float, numbers)
    return red, green, blue
