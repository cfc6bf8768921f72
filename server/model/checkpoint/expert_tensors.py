"""A checkpoint's experts, in any of its forms, copied into one weight of all experts."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from loraplex.server.model.checkpoint.area import Area, UnpackedArea
from loraplex.server.model.checkpoint.unpack import Cut, grouped
from loraplex.server.model.linear.packed import PackedWeight, joined
from loraplex.server.model.spec.linear_spec import ExpertStorage, LinearSpec, Part

_Unpack = Callable[[Area], UnpackedArea]
# Writes a device's part of a matrix, as the cut says.
_Writer = Callable[[Cut, torch.Tensor], None]


class ExpertTensors:
    """Read the weights of a layer's experts. cuts: what of each part the device has. mapped: a
    tensor of the checkpoint by its name, relative to the layer. fill_matrix: writes the weight
    of the module at a path. What is copied is one expert's part at a time: nothing holds all
    experts twice.
    """

    def __init__(
        self,
        spec: LinearSpec,
        cuts: Sequence[Cut],
        mapped: Callable[[str], torch.Tensor],
        fill_matrix: Callable[[str, Cut, torch.Tensor], None],
    ) -> None:
        if spec.stored is None:
            raise ValueError(f"{spec.role} has no experts")
        self._spec, self._cuts = spec, cuts
        self._heights = [cut.shape[0] for cut in cuts]
        self._stored: ExpertStorage = spec.stored
        self._mapped = mapped
        self._fill_matrix = fill_matrix

    def fill(self, weight: torch.Tensor) -> torch.Tensor:
        """Write the weights of all experts. weight: `[experts, out, in]` of the device, of any
        dtype. Returns it.
        """
        for writers, rows in zip(self._writers(), weight, strict=True):
            targets = rows.split(self._heights)
            for write, cut, target in zip(writers, self._cuts, targets, strict=True):
                write(cut, target)
        return weight

    def packed(self) -> PackedWeight | None:
        """The device's part of all experts' MXFP4 matrices, one below the other, as stored.

        None where a border lies within a block.
        """
        found = [
            cut.packed(unpack)
            for unpacks in self._quantised()
            for unpack, cut in zip(unpacks, self._cuts, strict=True)
        ]
        parts = [part for part in found if part is not None]
        return joined(parts) if len(parts) == len(found) else None

    def fill_bias(self, bias: torch.Tensor) -> None:
        """Write the biases of all experts. bias: `[experts, out]` of the device."""
        for row, target in zip(self._mapped(f"{self._stored.path}_bias"), bias, strict=True):
            for part, cut, rows in zip(
                self._parts(row), self._cuts, target.split(self._heights), strict=True
            ):
                cut.copy_rows(part, rows)

    def _writers(self) -> Iterator[list[_Writer]]:
        """Writers of the parts of each expert's matrix."""
        if self._stored.form == "each":
            for expert in range(self._spec.experts):
                paths = [part.path.format(expert) for part in self._spec.parts]
                yield [partial(self._fill_matrix, path) for path in paths]
        elif self._stored.form == "stacked":
            for matrix in self._mapped(self._stored.path):
                parts = self._parts(matrix.T if self._stored.transposed else matrix)
                yield [partial(_copy, part) for part in parts]
        elif self._stored.form == "rows":
            for matrices in zip(*map(self._of_rows, self._spec.parts), strict=True):
                yield [partial(_copy, matrix) for matrix in matrices]
        else:
            for unpacks in self._quantised():
                yield [partial(_dequantise, unpack) for unpack in unpacks]

    def _of_rows(self, part: Part) -> Iterator[torch.Tensor]:
        """Each expert's matrix of a part, taken from the rows of all experts."""
        for matrix in self._mapped(part.path).chunk(self._spec.experts):
            yield matrix.T if self._stored.transposed else matrix

    def _quantised(self) -> Iterator[list[_Unpack]]:
        """The parts of each expert's matrix in MXFP4."""
        stored = (self._mapped(f"{self._stored.path}_{name}") for name in ("blocks", "scales"))
        for of_expert in zip(*stored, strict=True):
            parts = zip(*map(self._parts, of_expert), strict=True)
            yield [partial(grouped, blocks, scales) for blocks, scales in parts]

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each part, taken from a tensor that holds the rows of all parts."""
        if self._stored.interleaved:
            count = len(self._spec.parts)
            return [rows[first::count] for first in range(count)]
        return list(rows.split(self._spec.widths))


def _copy(matrix: torch.Tensor, cut: Cut, target: torch.Tensor) -> None:
    cut.copy(matrix, target)


def _dequantise(unpack: _Unpack, cut: Cut, target: torch.Tensor) -> None:
    cut.dequantise(unpack, target)
