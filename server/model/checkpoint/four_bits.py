"""From bitsandbytes' 4 bits to the layout in memory."""

import json
from math import gcd
from typing import Any

import torch

from loraplex.server.model.checkpoint.area import Area, Stored, UnpackedArea
from loraplex.server.model.linear.packed import GroupedWeight, packed, unpacked
from loraplex.server.model.quantisation.forms import FourBitForm

_MOST_OF_STATE = 4096
_MOST_OF_BLOCK = 1 << 30
_MOST = 1e30


def unpack_four_bits(form: FourBitForm, stored: Stored) -> UnpackedArea:
    """Blocks lie in the flat matrix. Where they do not end with its rows, a group is what rows and
    blocks share. Where rows end within a byte, whole rows are read. Raises ValueError."""
    outputs, inputs = stored.shape
    state = _state(stored[form.state], form.numbers, [outputs, inputs])
    block = _positive(state, "blocksize")
    flat = stored["weight"].contiguous().view(torch.uint8).flatten()
    _check_sizes(stored, len(flat), block)
    group = gcd(block, inputs)
    if inputs % 2:
        area = Area(stored.area.rows, slice(0, inputs))
        codes = _of_odd_rows(flat, inputs, area.rows)
    else:
        area = stored.around(1, group)
        rows, columns = area
        codes = _swapped(flat.view(outputs, -1)[rows, columns.start // 2 : columns.stop // 2])
    absmax = _absmax(stored, state, _blocks(area, inputs, group, block))
    table = stored["weight.quant_map"].float()
    return UnpackedArea(GroupedWeight(codes, area.shape[1], 4, group, absmax, table=table), area)


def _check_sizes(stored: Stored, found_bytes: int, block: int) -> None:
    """Raises ValueError."""
    outputs, inputs = stored.shape
    nbytes, blocks = -(-outputs * inputs // 2), -(-outputs * inputs // block)
    found = stored["weight.absmax"].numel()
    if found_bytes != nbytes or found != blocks:
        raise ValueError(
            f"weight and weight.absmax must be of {nbytes} bytes and {blocks} blocks, got"
            f" {found_bytes} and {found}"
        )


def _swapped(codes: torch.Tensor) -> torch.Tensor:
    """The first of two lies in the upper bits, as it is stored."""
    return codes >> 4 | codes << 4


def _of_odd_rows(flat: torch.Tensor, inputs: int, rows: slice) -> torch.Tensor:
    first, last = rows.start * inputs, rows.stop * inputs
    codes = unpacked(_swapped(flat[first // 2 : -(-last // 2)]).view(1, -1), 4)
    begin = first % 2
    return packed(codes[0, begin : begin + last - first].view(-1, inputs), 4)


def _blocks(area: Area, inputs: int, group: int, block: int) -> torch.Tensor:
    """int64 `[rows, groups]`: the block of the flat matrix that each group lies in."""
    rows, columns = area
    of_rows = torch.arange(rows.start, rows.stop)[:, None] * inputs
    return (of_rows + torch.arange(columns.start, columns.stop, group)) // block


def _absmax(stored: Stored, state: dict[str, Any], blocks: torch.Tensor) -> torch.Tensor:
    """float32, of these blocks."""
    absmax = stored["weight.absmax"].flatten()
    if absmax.dtype != torch.uint8:
        return absmax[blocks].float()
    outer = stored["weight.nested_absmax"].flatten()
    size = _positive(state, "nested_blocksize")
    if len(outer) != -(-len(absmax) // size):
        raise ValueError(f"weight.nested_absmax must be of {-(-len(absmax) // size)} blocks")
    inner = stored["weight.nested_quant_map"].float()[absmax[blocks].int()]
    return inner * outer[blocks // size].float() + _number(state, "nested_offset")


def _state(text: torch.Tensor, numbers: str, shape: list[int]) -> dict[str, Any]:
    """bitsandbytes' JSON. Raises ValueError where it says anything else than was expected."""
    try:
        state = json.loads(bytes(text.flatten()[:_MOST_OF_STATE].tolist()))
        found = {"quant_type": state["quant_type"], "shape": list(state["shape"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"its quantisation state cannot be read ({error})") from None
    if found != {"quant_type": numbers, "shape": shape}:
        raise ValueError(f"its quantisation state is of {found}, expected {numbers} of {shape}")
    return dict(state)


def _positive(state: dict[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or not 0 < value <= _MOST_OF_BLOCK or value % 2:
        raise ValueError(f"its quantisation state must have an even {key}, got {value!r:.40}")
    return value


def _number(state: dict[str, Any], key: str) -> float:
    value = state.get(key)
    if not isinstance(value, int | float) or not -_MOST < value < _MOST:
        raise ValueError(f"its quantisation state must have a number {key}, got {value!r:.40}")
    return float(value)
