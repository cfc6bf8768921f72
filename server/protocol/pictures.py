"""Pictures of a prompt: where they lie in its tokens, and how many tokens they take. Pure."""

import math
from typing import Literal

import msgspec

Grid = tuple[int, int, int]
# The processor by whose rule a picture is resized and cut into patches.
PatchRule = Literal["qwen2_vl"]
# A picture that is so many times longer than wide, or wider than long, is refused.
_MAX_ASPECT = 200


class PictureSpan(msgspec.Struct, frozen=True, array_like=True):
    """A picture's placeholders in a prompt: prompt_ids[start : start + length].

    picture: SHA-256 of the file's bytes, in hex. grid: (time, height, width) in patches, before
    merge_size**2 of them become one token.
    """

    start: int
    length: int
    picture: str
    grid: Grid


class VisionCard(msgspec.Struct, frozen=True):
    """The way from a picture to a model's patches and tokens.

    patch_size: of a square patch, in pixels. temporal_patch_size: frames of one patch; a picture
    is repeated for them. merge_size: a square of so many by so many patches is one token.
    min_pixels, max_pixels: of the resized picture. mean, std: of red, green and blue, from 0 to 1.
    token_id: the placeholder of a token of a picture. opens_id, closes_id: the tokens around a
    picture.
    """

    rule: PatchRule
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    token_id: int
    opens_id: int
    closes_id: int

    @property
    def columns(self) -> int:
        """Numbers of one patch: three colours of all of its pixels and frames."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def most_resized_pixels(self) -> int:
        """A bound of the pixels of a resized picture: sides are multiples of whole tokens."""
        unit = self.patch_size * self.merge_size
        return 2 * max(self.min_pixels, self.max_pixels) + 2 * _MAX_ASPECT * unit**2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height to which a picture is resized. ValueError: it is too long and thin."""
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise ValueError(
                f"a picture of {width} x {height} pixels is more than {_MAX_ASPECT} times longer "
                "one way than the other"
            )
        unit = self.patch_size * self.merge_size
        wide, high = round(width / unit) * unit, round(height / unit) * unit
        if wide * high > self.max_pixels:
            shrunk = math.sqrt(height * width / self.max_pixels)
            wide = max(unit, math.floor(width / shrunk / unit) * unit)
            high = max(unit, math.floor(height / shrunk / unit) * unit)
        elif wide * high < self.min_pixels:
            grown = math.sqrt(self.min_pixels / (height * width))
            wide = math.ceil(width * grown / unit) * unit
            high = math.ceil(height * grown / unit) * unit
        return wide, high

    def grid(self, width: int, height: int) -> Grid:
        """Patches of a picture of so many pixels. ValueError: it is too long and thin."""
        wide, high = self.resized(width, height)
        return 1, high // self.patch_size, wide // self.patch_size

    def tokens(self, grid: Grid) -> int:
        """Tokens that a picture of this grid takes, without those around it."""
        return math.prod(grid) // self.merge_size**2
