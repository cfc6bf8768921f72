"""Work on pictures that pass a tower together: which rows are computed at once, and what they see.
Pure, but for numpy.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

import numpy as np

from loraplex.server.model.tower.geometry import window_table


class RowSpan(NamedTuple):
    """Rows begin .. end of a pass."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def within(self, begin: int) -> slice:
        """The same, counted from a row."""
        return slice(self.begin - begin, self.end - begin)


class WindowTable(NamedTuple):
    """Windows of some rows. patches: int64 `[windows, most]`, counted from the first of the rows;
    what fills up a window is any patch. seen: bool `[windows, 1, 1, most]`, False for that; None =
    every window is full. places: int64 `[rows]`, of each row among all places of windows."""

    patches: np.ndarray
    seen: np.ndarray | None
    places: np.ndarray


class Sight(NamedTuple):
    """Rows that attend to others. keys: the rows that each of them sees; windows: None, or each
    sees those of its window alone, and `keys` are the same rows."""

    rows: RowSpan
    keys: RowSpan
    windows: WindowTable | None = None


class TowerPiece(NamedTuple):
    """Rows whose queries, keys and values are there at once. products: these rows, as many as are
    multiplied at once. steps: parts of them, each of which goes through the rest of a layer."""

    products: tuple[RowSpan, ...]
    steps: tuple[tuple[Sight, ...], ...]


class TowerWork(NamedTuple):
    """The work of a layer that sees whole pictures, and of one of windows."""

    whole: tuple[TowerPiece, ...]
    windowed: tuple[TowerPiece, ...]


class TowerPart(NamedTuple):
    """A part of a picture whose rows see each other: height, width in patches. before: rows before
    those of its patches."""

    height: int
    width: int
    before: int = 0

    @property
    def rows(self) -> int:
        return self.height * self.width + self.before


class WorkSizes(NamedTuple):
    """chunk: rows that go through a layer at once. even: with so many rows to see, a row attends
    for as long as it is multiplied. side: as of PictureForm. window: as of PictureSpec."""

    chunk: int
    even: int
    side: int
    window: int


def plan_work(parts: Sequence[TowerPart], sizes: WorkSizes) -> TowerWork:
    """Divide the work on parts that pass together. What becomes one token stays together."""
    bounds = [RowSpan(*ends) for ends in pairwise(accumulate((p.rows for p in parts), initial=0))]
    if len(parts) > 1:
        whole = [Sight(rows, rows) for rows in bounds]
        windows = map(_windowed, parts, bounds, repeat(sizes)) if sizes.window else ()
        return TowerWork(_grouped(whole, sizes.chunk), _grouped(windows, sizes.chunk))
    ((part,), (every,)), unit = (parts, bounds), sizes.side**2
    products = tuple(_cut(every, sizes.chunk, unit))
    at_once = sizes.chunk * sizes.even // (sizes.even + every.size)
    steps = tuple((Sight(rows, every),) for rows in _cut(every, at_once, unit))
    # Lines of tokens, as many as a window is high, or some times so many.
    stripe = sizes.window * sizes.side * part.width
    stripes = _cut(every, sizes.chunk, stripe) if sizes.window else ()
    windowed = (TowerPiece((rows,), ((_windowed(part, rows, sizes),),)) for rows in stripes)
    return TowerWork((TowerPiece(products, steps),), tuple(windowed))


def _grouped(sights: Iterable[Sight], most: int) -> tuple[TowerPiece, ...]:
    """Pieces of neighbours that need no others."""
    groups: list[list[Sight]] = []
    for sight in sights:
        if not groups or sight.rows.end - groups[-1][0].rows.begin > most:
            groups.append([])
        groups[-1].append(sight)
    return tuple(
        TowerPiece((RowSpan(group[0].rows.begin, group[-1].rows.end),), (tuple(group),))
        for group in groups
    )


def _cut(rows: RowSpan, most: int, unit: int) -> Iterator[RowSpan]:
    size = max(most // unit, 1) * unit
    for begin in range(rows.begin, rows.end, size):
        yield RowSpan(begin, min(begin + size, rows.end))


def _windowed(part: TowerPart, rows: RowSpan, sizes: WorkSizes) -> Sight:
    """Divide rows of a part, which are whole windows."""
    lines = rows.size // part.width
    table = window_table((1, lines, part.width), sizes.side, sizes.window)
    is_patch = table >= 0
    places = np.empty(rows.size, dtype=np.int64)
    places[table[is_patch]] = np.flatnonzero(is_patch)
    seen = None if is_patch.all() else is_patch[:, None, None]
    return Sight(rows, rows, WindowTable(np.maximum(table, 0), seen, places))
