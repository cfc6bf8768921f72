"""A checkpoint's experts, in any of its forms, copied into one weight of all experts."""

from collections.abc import Callable, Iterator

import torch

from server.model.checkpoint.mxfp4 import dequantise, grouped
from server.model.linear.packed import GroupedWeight
from server.model.moe_spec import ExpertStorage
from server.model.spec import LinearSpec


class ExpertTensors:
    """mapped: a tensor of the checkpoint by its name, relative to the layer. fill_matrix: writes
    the weight of the module at a path. What is copied is one expert's part at a time: nothing holds
    all experts twice."""

    def __init__(
        self,
        spec: LinearSpec,
        mapped: Callable[[str], torch.Tensor],
        fill_matrix: Callable[[str, torch.Tensor], None],
    ) -> None:
        if spec.stored is None:
            raise ValueError(f"{spec.kind} has no experts")
        self._spec = spec
        self._stored: ExpertStorage = spec.stored
        self._mapped = mapped
        self._fill_matrix = fill_matrix

    def fill(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: `[experts, out, in]`, of any dtype and device. Returns it."""
        if self._stored.form == "each":
            for expert, rows in enumerate(weight):
                for part, target in zip(
                    self._spec.parts, rows.split(self._spec.widths), strict=True
                ):
                    self._fill_matrix(part.path.format(expert), target)
            return weight
        for expert, parts in enumerate(self._experts()):
            self._place(parts, weight[expert])
        return weight

    def packed(self) -> GroupedWeight:
        """Of MXFP4 the matrices of all experts, one below the other, as they are stored."""
        path = self._stored.path
        blocks, scales = (self._mapped(f"{path}_{name}") for name in ("blocks", "scales"))
        codes = torch.cat([torch.cat(self._parts(of_expert)) for of_expert in blocks])
        exponents = torch.cat([torch.cat(self._parts(of_expert)) for of_expert in scales])
        return grouped(codes, exponents)

    def fill_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """bias: `[experts, out]`. Returns it."""
        for expert, row in enumerate(self._mapped(f"{self._stored.path}_bias")):
            self._place(self._parts(row), bias[expert])
        return bias

    def _place(self, parts: list[torch.Tensor], target: torch.Tensor) -> None:
        row = 0
        for part in parts:
            target[row : row + len(part)].copy_(part)
            row += len(part)

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
