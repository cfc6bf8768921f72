"""Pictures of a prompt: where they lie in its tokens, and how many tokens they take. Pure."""

import math
from typing import Literal

import msgspec

Grid = tuple[int, int, int]
# The processor by whose rule a picture is resized and cut into patches.
PatchRule = Literal["qwen2_vl", "clip"]
# A picture that is so many times longer than wide, or wider than long, is refused.
_MAX_ASPECT = 200


class PictureSpan(msgspec.Struct, frozen=True, array_like=True):
    """A picture's placeholders in a prompt, from the first to the last: prompt_ids[start : start +
    length]. Tokens of text may lie between them.

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
    token_id: the placeholder of a token of a picture. spot_id: the token of a prompt that becomes a
    picture; None = the placeholder. opens_id, closes_id: the tokens that a prompt has around it;
    None = there is none. before, after: ids that come around a picture's placeholders. By the rule
    `clip` the shorter side gets `shortest_edge` pixels (0 = each gets `crop_size`), and the model
    sees the middle square of `crop_size` pixels a side; by the other both are 0.
    added_tokens: of a picture, beside those of its patches.
    """

    rule: PatchRule
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    token_id: int
    spot_id: int | None = None
    opens_id: int | None = None
    closes_id: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    min_pixels: int = 0
    max_pixels: int = 0
    shortest_edge: int = 0
    crop_size: int = 0
    added_tokens: int = 0

    @property
    def columns(self) -> int:
        """Numbers of one patch: three colours of all of its pixels and frames."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def spot(self) -> int:
        """The token of a prompt that becomes a picture."""
        return self.token_id if self.spot_id is None else self.spot_id

    @property
    def place(self) -> tuple[int, ...]:
        """Ids of a picture in a prompt, before it has its placeholders."""
        ids = (self.opens_id, self.spot, self.closes_id)
        return tuple(token_id for token_id in ids if token_id is not None)

    @property
    def most_seen_pixels(self) -> int:
        """A bound of the pixels that patches are made of."""
        if self.rule == "clip":
            return self.crop_size**2
        # Sides are multiples of whole tokens.
        unit = self.patch_size * self.merge_size
        return 2 * max(self.min_pixels, self.max_pixels) + 2 * _MAX_ASPECT * unit**2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height to which a picture is resized. ValueError: it is too long and thin."""
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise ValueError(
                f"a picture of {width} x {height} pixels is more than {_MAX_ASPECT} times longer "
                "one way than the other"
            )
        if self.crop_size and not self.shortest_edge:
            return self.crop_size, self.crop_size
        if self.crop_size:
            short, long = sorted((width, height))
            long = int(self.shortest_edge * long / short)
            wide, high = self.shortest_edge, long
            return (wide, high) if width <= height else (high, wide)
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

    def seen(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The pixels of a resized picture that patches are made of: left, top, right, bottom."""
        if not self.crop_size:
            return 0, 0, width, height
        left, top = (width - self.crop_size) // 2, (height - self.crop_size) // 2
        side = self.crop_size // self.patch_size * self.patch_size
        return left, top, left + side, top + side

    def grid(self, width: int, height: int) -> Grid:
        """Patches of a picture of so many pixels. ValueError: it is too long and thin."""
        wide, high = self.resized(width, height)
        if self.crop_size:
            wide = high = self.crop_size
        return 1, high // self.patch_size, wide // self.patch_size

    def tokens(self, grid: Grid) -> int:
        """Placeholders that a picture of this grid has."""
        return math.prod(grid) // self.merge_size**2 + self.added_tokens

    def ids(self, grid: Grid) -> list[int]:
        """Ids that come in place of the spot of a picture of this grid."""
        return [*self.before, *[self.token_id] * self.tokens(grid), *self.after]

    def span_ids(self, grid: Grid) -> tuple[int, list[int]]:
        """Ids from a picture's first placeholder to its last, and how many come before them."""
        ids = self.ids(grid)
        first, behind = ids.index(self.token_id), ids[::-1].index(self.token_id)
        return first, ids[first : len(ids) - behind]
