"""A part of a stored matrix, and what is unpacked to get it."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from loraplex.server.model.linear.packed import PackedWeight


class Area(NamedTuple):
    """Neighbouring rows and columns of a matrix `[out, in]`; an index of a tensor."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self
        return rows.stop - rows.start, columns.stop - columns.start

    def within(self, other: "Area") -> "Area":
        """Return the same area as a part of another one, which holds it."""
        rows, columns = (
            slice(mine.start - outer.start, mine.stop - outer.start)
            for mine, outer in zip(self, other, strict=True)
        )
        return Area(rows, columns)


def whole(shape: tuple[int, int]) -> Area:
    """Return the area that is all of a matrix `[out, in]`."""
    outputs, inputs = shape
    return Area(slice(0, outputs), slice(0, inputs))


def around(part: slice, unit: int, total: int) -> slice:
    """The smallest part of whole units around `part`, of so many features. A unit of all of them
    or more sets no border."""
    if unit >= total:
        return part
    return slice(part.start // unit * unit, min(-(-part.stop // unit) * unit, total))


def units(part: slice, unit: int) -> slice:
    """Numbers of the units that the part touches."""
    return slice(part.start // unit, -(-part.stop // unit))


class UnpackedArea(NamedTuple):
    """Part of a quantised matrix, read from a checkpoint. area: of the whole matrix, what weight
    holds: the smallest part of whole words, groups and blocks around what was asked for.
    """

    weight: PackedWeight
    area: Area

    def cut(self, area: Area) -> PackedWeight | None:
        """The part that was asked for; None where a border lies within a group."""
        if area == self.area:
            return self.weight
        return self.weight.cut(*area.within(self.area))

    def write(self, area: Area, place: torch.Tensor) -> None:
        """Dequantise what was asked for. place: of the area's shape, which is written."""
        weight = self.weight.to(place.device)
        if area == self.area:
            weight.dequantised(place)
            return
        outer = torch.empty(weight.shape, dtype=place.dtype, device=place.device)
        place.copy_(weight.dequantised(outer)[area.within(self.area)])


class Stored:
    """The tensors of one module. get: by suffix; None = it is not stored. shape: of the whole
    matrix, `[out, in]`. area: what of the matrix is asked for."""

    def __init__(
        self, get: Callable[[str], torch.Tensor | None], shape: tuple[int, int], area: Area
    ) -> None:
        self._get = get
        self.shape, self.area = shape, area

    def optional(self, suffix: str) -> torch.Tensor | None:
        return self._get(suffix)

    def __getitem__(self, suffix: str) -> torch.Tensor:
        """Return the tensor with this suffix. Raises ValueError where there is none."""
        tensor = self._get(suffix)
        if tensor is None:
            raise ValueError(f"{suffix} is missing")
        return tensor

    def around(self, high: int, wide: int) -> Area:
        """The area that is asked for, widened to whole units of `high` rows and `wide` columns."""
        outputs, inputs = self.shape
        rows, columns = self.area
        return Area(around(rows, high, outputs), around(columns, wide, inputs))
