"""How pictures are cut into tiles of one size, and what ids stand before each. Pure."""

from collections.abc import Iterator

import msgspec

from loraplex.server.protocol import picture_cuts
from loraplex.server.protocol.picture_cuts import PictureCut


class TileRule(msgspec.Struct, frozen=True):
    """Tiles of a picture, row by row; behind several comes all of the picture as one more.

    size: pixels a side of a tile. least, most: how many there are, but for that one. longest_edge:
    pixels that the longer side gets first, after which the picture is stretched to whole tiles, and
    all of it made of those; 0 = it is stretched to the tiles nearest to its shape. ids: before the
    placeholders of each tile by row and column; () = there are none. whole_ids: before those of the
    one more.
    """

    size: int
    least: int = 1
    most: int = 1
    longest_edge: int = 0
    ids: tuple[tuple[tuple[int, ...], ...], ...] = ()
    whole_ids: tuple[int, ...] = ()

    def shape(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles of a picture of so many pixels."""
        if self.most == 1:
            return 1, 1
        if not self.longest_edge:
            return picture_cuts.nearest_tiles(width, height, self.size, self.least, self.most)
        first = picture_cuts.with_longest(width, height, self.longest_edge)
        return picture_cuts.in_tiles(*first, self.size)

    def cuts(self, width: int, height: int, seen: int) -> list[PictureCut]:
        """The cuts of a picture of so many pixels, all of it last. seen: pixels a side of a tile
        that make patches."""
        rows, columns = self.shape(width, height)
        own = picture_cuts.tiles(rows, columns, self.size, seen)
        goes_on = bool(self.longest_edge)
        found = [PictureCut((columns * self.size, rows * self.size), own, goes_on)]
        if len(own) > 1:
            found.append(PictureCut((self.size, self.size), ((0, 0, seen, seen),), goes_on))
        if not goes_on:
            return found
        first = picture_cuts.with_longest(width, height, self.longest_edge)
        return [PictureCut(first, ()), *found]

    def ids_before(self, rows: int, columns: int) -> Iterator[tuple[int, ...]]:
        """Ids before the placeholders of each of several tiles, and of all of the picture."""
        for row in self.ids[:rows]:
            yield from row[:columns]
        yield self.whole_ids
