"""Divides the features of a model's modules between several devices. Pure.

A *shard* is one device's part of the model. All shards have the same shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

# By output features, by input features, or not at all.
Sharding = Literal["column", "row", "none"]
# Features of each shard are a multiple of this where they do not divide.
_ROUNDED = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the `count` parts that devices share a model in."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


class Span(msgspec.Struct, frozen=True):
    """Neighbouring features that shards share out evenly.

    unit: so many stay together, those of a head. Units are heads, which may be repeated but never
    filled up; single features are filled up with zeros where they do not divide.
    """

    features: int
    unit: int = 1

    @property
    def units(self) -> int:
        return self.features // self.unit

    def divides(self, count: int) -> bool:
        """Whether so many shards can share it."""
        return self.unit == 1 or self.units % count == 0 or count % self.units == 0

    def width(self, count: int) -> int:
        """Features of each shard."""
        if self.features % (count * self.unit) == 0:
            return self.features // count
        if self.unit > 1:
            return self.unit
        return -(-self.features // (count * _ROUNDED)) * _ROUNDED

    def piece(self, shard: Shard) -> slice:
        """Finds the features that a shard has."""
        if self.unit > 1:
            heads = heads_of(self.units, shard)
            return slice(heads.start * self.unit, heads.stop * self.unit)
        width = self.width(shard.count)
        begin, end = (min(n * width, self.features) for n in (shard.index, shard.index + 1))
        return slice(begin, end)


def heads_of(heads: int, shard: Shard) -> slice:
    """Finds a shard's heads. Fewer heads than shards are repeated, among neighbouring shards."""
    each = max(1, heads // shard.count)
    begin = shard.index * heads // shard.count
    return slice(begin, begin + each)


class Piece(NamedTuple):
    """Some features of a module, and their place among those of the shard."""

    source: slice
    target: slice


class Groups(msgspec.Struct, frozen=True):
    """How a file holds the spans of a module: in `count` groups, one behind the other.

    Each group has an equal part of every span. order: of the spans in a group, by their numbers;
    () = as they are listed.
    """

    count: int = 1
    order: tuple[int, ...] = ()


UNGROUPED = Groups()


def pieces(spans: Sequence[Span], shard: Shard, groups: Groups = UNGROUPED) -> tuple[Piece, ...]:
    """A shard's pieces of each span, one after the other. groups: as the file has them."""
    found, target = [], 0
    widths = [span.features // groups.count for span in spans]
    order = groups.order or tuple(range(len(spans)))
    for number, span in enumerate(spans):
        mine, width = span.piece(shard), widths[number]
        before = sum(widths[other] for other in order[: order.index(number)])
        for group in range(groups.count):
            begin, end = max(mine.start, group * width), min(mine.stop, (group + 1) * width)
            if begin >= end and groups.count > 1:
                continue
            source = group * (sum(widths) - width) + before + begin
            at, size = target + begin - mine.start, end - begin
            found.append(Piece(slice(source, source + size), slice(at, at + size)))
        target += span.width(shard.count)
    return tuple(found)


def total_width(spans: Sequence[Span], count: int) -> int:
    """Features of each shard."""
    return sum(span.width(count) for span in spans)
