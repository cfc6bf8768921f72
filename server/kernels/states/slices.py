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


class Runs(NamedTuple):
    """Slices of several tokens. table: int32 `[4, slices]`: row, first token in the batch, tokens,
    and position of the first. longest: the most tokens of one."""

    table: torch.Tensor
    longest: int

    @property
    def num_slices(self) -> int:
        return int(self.table.shape[1])


Slices = Singles | Runs


@triton.jit
def slice_of(table_ptr: tl.tensor, count: tl.tensor) -> Any:
    """Row, first token, number of tokens and position of the program's slice. table: of `Runs`."""
    place = table_ptr + tl.program_id(0)
    row, begin = tl.load(place).to(tl.int64), tl.load(place + count).to(tl.int64)
    return row, begin, tl.load(place + 2 * count), tl.load(place + 3 * count)
