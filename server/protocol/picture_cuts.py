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
    """A picture resized to `size`, and the boxes that are cut from it. goes_on: what is resized is
    not the picture, but what the cut before has made of it."""

    size: _Size
    boxes: tuple[Box, ...]
    goes_on: bool = False


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


def tiles(rows: int, columns: int, side: int, seen: int) -> tuple[Box, ...]:
    """Boxes of tiles of `side` pixels a side, row by row, of which the first `seen` are taken each
    way."""
    corners = ((column * side, row * side) for row in range(rows) for column in range(columns))
    return tuple((left, top, left + seen, top + seen) for left, top in corners)


def with_longest(width: int, height: int, longest: int) -> _Size:
    """The size whose longer side is `longest`; the other one is an even number, if not less than a
    pixel."""
    ratio = width / height
    if width >= height:
        high = int(longest / ratio)
        return longest, max(high + high % 2, 1)
    wide = int(longest * ratio)
    return max(wide + wide % 2, 1), longest


def in_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Rows and columns of tiles of `side` pixels a side that a picture is stretched to. The longer
    side decides first."""
    ratio = width / height
    if width >= height:
        columns = -(-width // side)
        return -(-int(columns * side / ratio) // side), columns
    rows = -(-height // side)
    return rows, -(-int(rows * side * ratio) // side)


def nearest_tiles(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of `least` to `most` tiles, as near the picture's shape as may be. Of shapes
    equally near the later, of more tiles, is taken where the picture has more than half of their
    pixels."""
    sizes = range(1, most + 1)
    shapes = [(c, r) for c in sizes for r in sizes if least <= c * r <= most]
    nearest, found = math.inf, (1, 1)
    for columns, rows in sorted(shapes, key=math.prod):
        off = abs(width / height - columns / rows)
        is_large = width * height > 0.5 * side * side * columns * rows
        if off < nearest or (off == nearest and is_large):
            nearest, found = off, (rows, columns)
    return found
