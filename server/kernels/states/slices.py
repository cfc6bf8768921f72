"""Slices of a batch, as the kernels of states take them."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Singles(NamedTuple):
    """Slices of one token each: the batch's first ones. rows: int32 `[slices]`; positions: int64
    `[slices]`, of the tokens in their sequences."""

    rows: torch.Tensor
    positions: torch.Tensor

    @property
    def num_slices(self) -> int:
        return len(self.rows)


class Walks(NamedTuple):
    """Slices of one token each: the batch's first ones. Neighbours of one row are a walk: a token
    and, behind it, its draft, which leaves no trace in the state. rows, positions: as of `Singles`.
    lengths: int32 `[slices]`, tokens of the walk that a slice begins; 0 = it begins none. replays:
    int32 `[slices]`, tokens of the row's last draft that the state takes before. depth: tokens of
    a draft at most, and of replays.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    replays: torch.Tensor
    depth: int

    @property
    def num_slices(self) -> int:
        return len(self.rows)


class Runs(NamedTuple):
    """Slices of several tokens. table: int32 `[4, slices]`: row, first token in the batch, tokens,
    and position of the first. longest: the most tokens of one."""

    table: torch.Tensor
    longest: int

    @property
    def num_slices(self) -> int:
        return int(self.table.shape[1])


Slices = Singles | Walks | Runs


def walked(slices: Singles | Walks) -> tuple[tuple[torch.Tensor, ...], int]:
    """The tensors of `Walks` as kernels take them, and its depth. Singles are walks of depth 0,
    whose last two tensors nobody reads."""
    if isinstance(slices, Walks):
        return slices[:4], slices.depth
    return (*slices, slices.rows, slices.rows), 0


@triton.jit
def slice_of(table_ptr: tl.tensor, count: tl.tensor) -> Any:
    """Row, first token, number of tokens and position of the program's slice. table: of `Runs`."""
    place = table_ptr + tl.program_id(0)
    row, begin = tl.load(place).to(tl.int64), tl.load(place + count).to(tl.int64)
    return row, begin, tl.load(place + 2 * count), tl.load(place + 3 * count)
