"""Sizes to which pictures are resized, and what is cut from them, as processors have it. Pure.

Sizes are (width, height), in pixels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

_Size = tuple[int, int]
# Left, top, right, bottom, in pixels. Black where no picture is.
Box = tuple[int, int, int, int]


class PictureCut(NamedTuple):
    """A picture resized to `size`, and the boxes that are cut from it."""

    size: _Size
    boxes: tuple[Box, ...]


def whole(size: _Size) -> PictureCut:
    """All of a resized picture."""
    return PictureCut(size, ((0, 0, *size),))


def middle(size: _Size, side: int, seen: int) -> PictureCut:
    """The middle square of `side` pixels a side, of which the first `seen` are taken each way."""
    left, top = ((length - side) // 2 for length in size)
    return PictureCut(size, ((left, top, left + seen, top + seen),))


def with_shortest(width: int, height: int, shortest: int) -> _Size:
    """The size whose shorter side is `shortest`."""
    short, long = sorted((width, height))
    long = int(shortest * long / short)
    return (shortest, long) if width <= height else (long, shortest)


def with_area(width: int, height: int, unit: int, least: int, most: int) -> _Size:
    """The size of `least` to `most` pixels, whose sides are multiples of `unit`."""
    wide, high = round(width / unit) * unit, round(height / unit) * unit
    if wide * high > most:
        shrunk = math.sqrt(height * width / most)
        wide = max(unit, math.floor(width / shrunk / unit) * unit)
        high = max(unit, math.floor(height / shrunk / unit) * unit)
    elif wide * high < least:
        grown = math.sqrt(least / (height * width))
        wide = math.ceil(width * grown / unit) * unit
        high = math.ceil(height * grown / unit) * unit
    return wide, high


def within(width: int, height: int, unit: int, longest: int) -> _Size:
    """The size whose sides are multiples of `unit`, at least as long as those of the picture, which
    first is made so small that none is longer than `longest`."""
    shrunk = max(width, height) / longest
    if shrunk > 1:
        width, height = math.floor(width / shrunk), math.floor(height / shrunk)
    wide, high = (-(-length // unit) * unit for length in (width, height))
    return wide, high


def best_tiling(
    width: int, height: int, side: int, tilings: Sequence[tuple[int, int]]
) -> tuple[int, tuple[int, int]]:
    """The place and the tiling, of numbers of tiles by height and width, that keeps most of the
    picture's pixels, and of those the smallest. side: of a tile, in pixels."""

    def kept(tiling: tuple[int, int]) -> tuple[int, int]:
        high, wide = (side * number for number in tiling)
        scale = min(wide / width, high / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - wide * high

    return max(enumerate(tilings), key=lambda each: kept(each[1]))


def in_tiling(width: int, height: int, side: int, tiling: tuple[int, int], seen: int) -> PictureCut:
    """The picture as large as the tiles hold it, in the middle of them. seen: pixels of a tile that
    are taken each way, the first ones."""
    high, wide = (side * number for number in tiling)
    if wide / width < high / height:
        size = wide, min(math.ceil(height * (wide / width)), high)
    else:
        size = min(math.ceil(width * (high / height)), wide), high
    left, top = (wide - size[0]) // 2, (high - size[1]) // 2
    corners = [(x - left, y - top) for y in range(0, high, side) for x in range(0, wide, side)]
    return PictureCut(size, tuple((x, y, x + seen, y + seen) for x, y in corners))


def without_padding(width: int, height: int, high: int, wide: int) -> tuple[int, int]:
    """Height and width, in patches, of what is left of `high * wide` patches without padding, whose
    half is cut off on each side."""
    if width / height > wide / high:
        return high - (high - int(round(height * (wide / width), 7))) // 2 * 2, wide
    return high, wide - (wide - int(round(width * (high / height), 7))) // 2 * 2


def filling(width: int, height: int, unit: int, most: int) -> _Size:
    """The largest size of a picture's shape that has at most `most` pixels and whose sides are
    multiples of `unit`; of long and thin pictures one side is `unit`."""
    factor = math.sqrt(most / (width * height))
    wide, high = (math.floor(factor * length / unit) * unit for length in (width, height))
    longest = most // unit
    if not high:
        return min(width // height * unit, longest), unit
    if not wide:
        return unit, min(height // width * unit, longest)
    return wide, high
