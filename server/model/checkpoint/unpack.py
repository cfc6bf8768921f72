"""From a checkpoint's form of a quantised matrix to the layout in memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

import torch

from server.model.linear.packed import (
    Fp8Weight,
    GroupedWeight,
    PackedWeight,
    packed,
    unpacked,
)
from server.model.quantisation.forms import (
    AwqForm,
    EightBitForm,
    FourBitForm,
    GptqForm,
    PackedForm,
    RowwiseForm,
    WeightForm,
)

# Of a word's eight numbers, lowest bits first, the columns that they are of.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# One in every number of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}
_INT8_ZERO = 128
_MOST_OF_STATE = 4096


class Stored:
    """The tensors of one module. get: by suffix; None = it is not stored."""

    def __init__(
        self, get: Callable[[str], torch.Tensor | None], out_features: int, in_features: int
    ) -> None:
        self._get = get
        self.out_features, self.in_features = out_features, in_features

    def optional(self, suffix: str) -> torch.Tensor | None:
        return self._get(suffix)

    def __getitem__(self, suffix: str) -> torch.Tensor:
        """Raises ValueError where there is none."""
        tensor = self._get(suffix)
        if tensor is None:
            raise ValueError(f"{suffix} is missing")
        return tensor


def unpack(form: WeightForm, stored: Stored) -> PackedWeight:
    """Raises ValueError where tensors contradict each other."""
    match form:
        case EightBitForm():
            return _eight_bits(form, stored)
        case AwqForm():
            return _awq(form, stored)
        case GptqForm():
            return _gptq(form, stored)
        case PackedForm():
            return _pack_quantized(form, stored)
        case FourBitForm():
            return _four_bits(form, stored)
        case RowwiseForm():
            scales = stored["SCB"].float()[:, None] / 127
            return _int8(stored["weight"], scales, None, (1, stored.in_features))
        case _:
            assert_never(form)


def _eight_bits(form: EightBitForm, stored: Stored) -> PackedWeight:
    outputs, inputs = stored.out_features, stored.in_features
    rows, columns = form.block
    if form.scales == "tensor":
        rows, columns = outputs, inputs
    elif form.scales == "channel":
        rows, columns = 1, inputs
    elif form.scales == "group":
        rows = 1
    shape = (-(-outputs // rows), -(-inputs // columns))
    scales = stored[form.scale].float().view(shape)
    if form.numbers == "fp8":
        return Fp8Weight(stored["weight"], scales, (rows, columns))
    zeros = stored["weight_zero_point"].view(shape) if form.asymmetric else None
    return _int8(stored["weight"], scales, zeros, (rows, columns))


def _int8(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, block: tuple[int, int]
) -> GroupedWeight:
    """As codes, which are 128 more. scales: float32; zeros: int8; one for each block."""

    def by_row(of_blocks: torch.Tensor) -> torch.Tensor:
        return of_blocks.repeat_interleave(block[0], dim=0)[:outputs].contiguous()

    outputs, inputs = numbers.shape
    least: torch.Tensor | int = _INT8_ZERO
    if zeros is not None:
        least = by_row(_codes(zeros))
    return GroupedWeight(_codes(numbers), inputs, 8, block[1], by_row(scales), least)


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8) ^ _INT8_ZERO


def _awq(form: AwqForm, stored: Stored) -> GroupedWeight:
    codes, zeros = (_in_columns(stored[name]) for name in ("qweight", "qzeros"))
    scales = stored["scales"].T.contiguous()
    grouping = (stored.in_features, 4, form.group)
    return GroupedWeight(packed(codes.T, 4), *grouping, scales, zeros.T.contiguous())


def _in_columns(words: torch.Tensor) -> torch.Tensor:
    """int32 `[rows, n]` -> uint8 `[rows, 8 n]`, in AWQ's order of columns."""
    numbers = unpacked(_bytes(words), 4).view(*words.shape, 8)
    ordered = torch.empty_like(numbers)
    ordered[..., list(_AWQ_COLUMNS)] = numbers
    return ordered.flatten(1)


def _gptq(form: GptqForm, stored: Stored) -> GroupedWeight:
    words = stored["qzeros"]
    if form.zeros_less_one:  # whose writer subtracted from whole words, with their borrows
        words = words + _ONES[form.bits]
    zeros = unpacked(_bytes(words), form.bits)[:, : stored.out_features].T.contiguous()
    codes, scales = _bytes(stored["qweight"].T), stored["scales"].T.contiguous()
    group = form.group or stored.in_features
    weight = GroupedWeight(codes, stored.in_features, form.bits, group, scales, zeros)
    return _by_group(weight, stored.optional("g_idx"))


def _by_group(weight: GroupedWeight, g_idx: torch.Tensor | None) -> GroupedWeight:
    """The same with its columns sorted by group. g_idx: the group of each input."""
    codes, width = weight.codes, weight.in_features
    order = None if g_idx is None else _order(g_idx, weight.group, width)
    if order is not None:
        codes = packed(unpacked(codes, weight.bits)[:, order], weight.bits)
    bytes_of_row = -(-width * weight.bits // 8)
    return replace(weight, codes=codes[:, :bytes_of_row].contiguous(), order=order)


def _order(g_idx: torch.Tensor, group: int, inputs: int) -> torch.Tensor | None:
    """The inputs by group; None = they lie so."""
    plain = torch.arange(inputs) // group
    groups = g_idx.long()
    if torch.equal(groups, plain):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], plain):
        raise ValueError(f"g_idx must have {group} inputs in each group")
    return order


def _pack_quantized(form: PackedForm, stored: Stored) -> GroupedWeight:
    inputs, outputs = stored.in_features, stored.out_features
    shape = stored.optional("weight_shape")
    if shape is not None and shape.tolist() != [outputs, inputs]:
        raise ValueError(f"weight_shape is {shape.tolist()}, expected {[outputs, inputs]}")
    group = form.group or inputs
    scales = stored["weight_scale"].view(-1, 1 if form.group is None else -(-inputs // group))
    scales = scales.expand(outputs, -1).contiguous()
    zeros: torch.Tensor | int = 1 << form.bits - 1
    if form.asymmetric:
        numbers = unpacked(_bytes(stored["weight_zero_point"].T), form.bits)
        zeros = numbers[:, :outputs].T.contiguous()
    codes = _bytes(stored["weight_packed"])
    weight = GroupedWeight(codes, inputs, form.bits, group, scales, zeros)
    return _by_group(weight, stored.optional("weight_g_idx"))


def _four_bits(form: FourBitForm, stored: Stored) -> GroupedWeight:
    """The matrix in one row where blocks do not end with its rows."""
    inputs, outputs = stored.in_features, stored.out_features
    state = _state(stored[form.state], form.numbers, [outputs, inputs])
    block = _positive(state, "blocksize")
    blocks, nbytes = -(-outputs * inputs // block), -(-outputs * inputs // 2)
    flat = stored["weight"].contiguous().view(torch.uint8).flatten()
    absmax = _absmax(stored, state, blocks)
    if len(flat) != nbytes or len(absmax) != blocks:
        raise ValueError(
            f"weight and weight.absmax must be of {nbytes} bytes and {blocks} blocks, got"
            f" {len(flat)} and {len(absmax)}"
        )
    # The first of two lies in the upper bits.
    codes, rows = flat >> 4 | flat << 4, outputs if inputs % block == 0 else 1
    table = stored["weight.quant_map"].float()
    grouping = (outputs * inputs // rows, 4, block)
    return GroupedWeight(codes.view(rows, -1), *grouping, absmax.view(rows, -1), table=table)


def _absmax(stored: Stored, state: dict[str, Any], blocks: int) -> torch.Tensor:
    """float32 `[blocks]`."""
    absmax = stored["weight.absmax"].flatten()
    if absmax.dtype != torch.uint8:
        return absmax.float()
    outer = stored["weight.nested_absmax"].float().flatten()
    size = _positive(state, "nested_blocksize")
    if len(outer) != -(-blocks // size):
        raise ValueError(f"weight.nested_absmax must be of {-(-blocks // size)} blocks")
    inner = stored["weight.nested_quant_map"].float()[absmax.int()]
    return inner * outer.repeat_interleave(size)[: len(absmax)] + float(state["nested_offset"])


def _state(text: torch.Tensor, numbers: str, shape: list[int]) -> dict[str, Any]:
    """bitsandbytes' JSON. Raises ValueError where it says anything else than was expected."""
    try:
        state = json.loads(bytes(text.flatten()[:_MOST_OF_STATE].tolist()))
        found = {"quant_type": state["quant_type"], "shape": list(state["shape"])}
        float(state.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its quantisation state cannot be read ({error})") from None
    if found != {"quant_type": numbers, "shape": shape}:
        raise ValueError(f"its quantisation state is of {found}, expected {numbers} of {shape}")
    return dict(state)


def _positive(state: dict[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or value <= 0 or value % 2:
        raise ValueError(f"its quantisation state must have an even {key}, got {value!r}")
    return value


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 `[rows, n]` -> uint8 `[rows, 4 n]`, the lowest bits first."""
    return words.contiguous().view(torch.uint8)
