"""Sizes to which pictures are resized, and what is cut from them, as processors have it. Pure.

Sizes are (width, height), in pixels.
"""

import math
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
