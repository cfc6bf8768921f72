"""The rows and columns of a stored matrix that one of several devices has."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from loraplex.adapters.sharding import WHOLE, Piece, Shard, Span, pieces, total_width
from loraplex.server.model.checkpoint.area import Area, UnpackedArea
from loraplex.server.model.linear.packed import PackedWeight, joined
from loraplex.server.model.spec.linear_spec import LinearSpec, Part


class Cut(NamedTuple):
    """A device's part of a matrix `[out, in]`.

    whole: the matrix's shape. shape: of the part. rows, columns: what lies where in the part; the
    rest are zeros.
    """

    whole: tuple[int, int]
    shape: tuple[int, int]
    rows: tuple[Piece, ...]
    columns: Piece

    @property
    def is_whole(self) -> bool:
        return self.whole == self.shape

    @property
    def is_full(self) -> bool:
        """Whether no zeros fill it up."""
        found = sum(size(piece) for piece in self.rows), size(self.columns)
        return found == self.shape

    def areas(self) -> Iterator[tuple[Area, Area]]:
        """Areas of the whole matrix, and where each lies in the device's part. None is empty."""
        for rows in self.rows:
            if size(rows) and size(self.columns):
                source = Area(rows.source, self.columns.source)
                yield source, Area(rows.target, self.columns.target)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the device's part of a matrix. source: the whole matrix. target: `shape`, which is
        written where there is a source.
        """
        for area, place in self.areas():
            target[place].copy_(source[area])

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the device's part of a vector with one number for each row."""
        for rows in self.rows:
            target[rows.target].copy_(source[rows.source])

    def dequantise(self, unpack: Callable[[Area], UnpackedArea], target: torch.Tensor) -> None:
        """Dequantise the device's part of a matrix into target."""
        for area, place in self.areas():
            unpack(area).write(area, target[place])

    def packed(self, unpack: Callable[[Area], UnpackedArea]) -> PackedWeight | None:
        """The part of a quantised matrix; None where a border lies within a group, or zeros fill
        the part up."""
        if not self.is_full:
            return None
        parts = [unpack(area).cut(area) for area, _ in self.areas()]
        found = [part for part in parts if part is not None]
        return joined(found) if len(found) == len(parts) else None


def size(piece: Piece) -> int:
    return int(piece.source.stop - piece.source.start)


def cut_of(spec: LinearSpec, part: Part, shard: Shard) -> Cut:
    """The device's part of a whole matrix."""
    outputs: tuple[Span, ...] = (Span(part.out_features),)
    inputs = (Span(spec.in_features),)
    of_rows = of_columns = WHOLE
    if spec.sharding == "column":
        outputs, of_rows = spec.spans_of(part), shard
    elif spec.sharding == "row":
        of_columns = shard
    shape = (total_width(outputs, of_rows.count), total_width(inputs, of_columns.count))
    (columns,) = pieces(inputs, of_columns)
    whole = (part.out_features, spec.in_features)
    return Cut(whole, shape, pieces(outputs, of_rows, part.groups), columns)
