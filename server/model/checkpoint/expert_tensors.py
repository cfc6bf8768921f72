"""A checkpoint's experts, in any of its forms, copied into one weight of all experts."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from server.model.checkpoint.cuts import Cut
from server.model.checkpoint.mxfp4 import dequantise, grouped
from server.model.linear.packed import GroupedWeight, joined
from server.model.moe_spec import ExpertStorage
from server.model.spec import LinearSpec


class ExpertTensors:
    """cuts: what of each part the device has. mapped: a tensor of the checkpoint by its name,
    relative to the layer. fill_matrix: writes the weight of the module at a path. What is copied is
    one expert's part at a time: nothing holds all experts twice."""

    def __init__(
        self,
        spec: LinearSpec,
        cuts: Sequence[Cut],
        mapped: Callable[[str], torch.Tensor],
        fill_matrix: Callable[[str, Cut, torch.Tensor], None],
    ) -> None:
        if spec.stored is None:
            raise ValueError(f"{spec.kind} has no experts")
        self._spec, self._cuts = spec, cuts
        self._heights = [cut.shape[0] for cut in cuts]
        self._stored: ExpertStorage = spec.stored
        self._mapped = mapped
        self._fill_matrix = fill_matrix

    def fill(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: `[experts, out, in]` of the device, of any dtype. Returns it."""
        if self._stored.form == "each":
            for expert, rows in enumerate(weight):
                targets = zip(self._spec.parts, self._cuts, rows.split(self._heights), strict=True)
                for part, cut, target in targets:
                    self._fill_matrix(part.path.format(expert), cut, target)
            return weight
        for parts, rows in zip(self._experts(), weight, strict=True):
            places = rows.split(self._heights)
            for matrix, cut, place in zip(parts, self._cuts, places, strict=True):
                cut.copy(matrix, place)
        return weight

    def packed(self) -> GroupedWeight | None:
        """Of MXFP4 the device's part of all experts' matrices, one below the other, as they are
        stored. None where a border lies within a block."""
        path = self._stored.path
        of_experts = zip(
            *(self._mapped(f"{path}_{name}") for name in ("blocks", "scales")), strict=True
        )
        found = [
            cut.packed(partial(grouped, blocks, scales))
            for each in of_experts
            for blocks, scales, cut in zip(*map(self._parts, each), self._cuts, strict=True)
        ]
        parts = [part for part in found if part is not None]
        whole = joined(parts) if len(parts) == len(found) else None
        return whole if isinstance(whole, GroupedWeight) else None

    def fill_bias(self, bias: torch.Tensor) -> None:
        """bias: `[experts, out]` of the device."""
        for row, target in zip(self._mapped(f"{self._stored.path}_bias"), bias, strict=True):
            for part, cut, rows in zip(
                self._parts(row), self._cuts, target.split(self._heights), strict=True
            ):
                cut.copy_rows(part, rows)

    def _experts(self) -> Iterator[list[torch.Tensor]]:
        """The parts of each expert, `[out, in]` each, of one tensor for all."""
        path = self._stored.path
        if self._stored.form == "stacked":
            for matrix in self._mapped(path):
                yield self._parts(matrix.T if self._stored.transposed else matrix)
        else:
            blocks, scales = (self._mapped(f"{path}_{name}") for name in ("blocks", "scales"))
            for of_expert in zip(blocks, scales, strict=True):
                yield self._parts(dequantise(*of_expert))

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Of what holds the rows of all parts."""
        if self._stored.interleaved:
            count = len(self._spec.parts)
            return [rows[first::count] for first in range(count)]
        return list(rows.split(self._spec.widths))
