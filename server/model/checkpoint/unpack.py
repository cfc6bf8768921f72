"""From a checkpoint's form of a quantised matrix to the layout in memory, of the rows and columns
that one of several devices has."""

import json
from collections.abc import Callable, Iterator
from math import gcd, lcm
from typing import Any, NamedTuple, assert_never

import torch

from loraplex.adapters.base import WHOLE, Piece, Shard, Span, pieces, total_width
from loraplex.server.model.checkpoint.area import Area, Stored, UnpackedArea, around, units
from loraplex.server.model.linear.packed import PackedWeight, joined, packed, unpacked
from loraplex.server.model.quantisation.forms import (
    AwqForm,
    EightBitForm,
    FourBitForm,
    Fp4Form,
    GptqForm,
    PackedForm,
    RowwiseForm,
    WeightForm,
)
from loraplex.server.model.spec.linear_spec import MXFP4_BLOCK, LinearSpec, Part

# Of a word's eight numbers, lowest bits first, the columns that they are of.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# One in every number of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}
_INT8_ZERO = 128
# bitsandbytes' number for rows one behind the other; other numbers are tiles of old GPUs.
_ROWS = 0


_MOST_OF_STATE = 4096
_MOST_OF_BLOCK = 1 << 30
_MOST = 1e30

# MXFP4 is of OCP's Microscaling Formats 1.0: blocks of FP4 (E2M1) with a scale (E8M0).
# By a code's four bits: sign, two of the exponent, one of the mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
SCALE_BIAS = 127


def unpack_four_bits(form: FourBitForm, stored: Stored) -> UnpackedArea:
    """Read part of a matrix of 4-bit codes. Blocks lie in the flat matrix. Where they do not end
    with its rows, a group is what rows and blocks share. Where rows end within a byte, whole
    rows are read. Raises ValueError.
    """
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
    return UnpackedArea(PackedWeight(codes, area.shape[1], 4, group, absmax, table=table), area)


def _check_sizes(stored: Stored, found_bytes: int, block: int) -> None:
    """Check how many bytes and blocks there are. Raises ValueError."""
    outputs, inputs = stored.shape
    nbytes, blocks = -(-outputs * inputs // 2), -(-outputs * inputs // block)
    found = stored["weight.absmax"].numel()
    if found_bytes != nbytes or found != blocks:
        raise ValueError(
            f"weight and weight.absmax must be of {nbytes} bytes and {blocks} blocks, got"
            f" {found_bytes} and {found}"
        )


def _swapped(codes: torch.Tensor) -> torch.Tensor:
    """Swap the two codes of each byte: the first of two lies in the upper bits, as it is stored."""
    return codes >> 4 | codes << 4


def _of_odd_rows(flat: torch.Tensor, inputs: int, rows: slice) -> torch.Tensor:
    first, last = rows.start * inputs, rows.stop * inputs
    codes = unpacked(_swapped(flat[first // 2 : -(-last // 2)]).view(1, -1), 4)
    begin = first % 2
    return packed(codes[0, begin : begin + last - first].view(-1, inputs), 4)


def _blocks(area: Area, inputs: int, group: int, block: int) -> torch.Tensor:
    """Return the block of the flat matrix that each group lies in, int64 `[rows, groups]`."""
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


def unpack(form: WeightForm, stored: Stored) -> UnpackedArea:
    """The area of the matrix that is asked for. No other numbers are read.

    Raises ValueError where tensors contradict each other.
    """
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
            return unpack_four_bits(form, stored)
        case Fp4Form():
            return _four_bit_floats(form, stored)
        case RowwiseForm():
            return _rowwise(stored)
        case _:
            assert_never(form)


def _eight_bits(form: EightBitForm, stored: Stored) -> UnpackedArea:
    outputs, inputs = stored.shape
    rows, columns = form.block
    if form.scales == "tensor":
        rows, columns = outputs, inputs
    elif form.scales == "channel":
        rows, columns = 1, inputs
    elif form.scales == "group":
        rows = 1
    shape = (-(-outputs // rows), -(-inputs // columns))
    area = stored.around(rows, columns)
    blocks = units(area.rows, rows), units(area.columns, columns)
    scales = stored[form.scale].view(shape)[blocks].float()
    numbers = stored["weight"][area]
    if form.numbers == "fp8":
        width = area.shape[1]
        return UnpackedArea(PackedWeight(numbers, width, 0, columns, scales, rows=rows), area)
    zeros = stored["weight_zero_point"].view(shape)[blocks] if form.asymmetric else None
    return UnpackedArea(_int8(numbers, scales, zeros, (rows, columns)), area)


def _four_bit_floats(form: Fp4Form, stored: Stored) -> UnpackedArea:
    if stored.shape[1] % form.group:
        raise ValueError(f"{stored.shape[1]} inputs are no whole groups of {form.group}")
    codes, scales = stored[form.codes], stored["weight_scale"]
    if form.whole is None:
        return grouped(codes, scales, stored.area)
    whole = float(stored[form.whole].float().max())
    if not 0.0 < whole < _MOST:
        raise ValueError(f"{form.whole} must be a positive number, got {whole}")
    area = stored.around(1, form.group)
    of_groups = scales[area.rows, units(area.columns, form.group)].float()
    found = of_groups / whole if form.divides else of_groups * whole
    mine = codes[area.rows, units(area.columns, 2)].contiguous()
    table = torch.tensor(E2M1)
    return UnpackedArea(PackedWeight(mine, area.shape[1], 4, form.group, found, table=table), area)


def _rowwise(stored: Stored) -> UnpackedArea:
    layout = stored.optional("weight_format")
    if layout is not None and int(layout.max()) != _ROWS:
        raise ValueError(
            f"weight_format is {int(layout.max())}, a layout of old GPUs: quantise the model again"
        )
    area = stored.area
    scales = stored["SCB"][area.rows].float()[:, None] / 127
    numbers = stored["weight"][area]
    return UnpackedArea(_int8(numbers, scales, None, (1, stored.shape[1])), area)


def _int8(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, block: tuple[int, int]
) -> PackedWeight:
    """Turn int8 numbers into a weight of codes, which are 128 more. scales: float32; zeros: int8;
    one for each block.
    """

    def by_row(of_blocks: torch.Tensor) -> torch.Tensor:
        return of_blocks.repeat_interleave(block[0], dim=0)[:outputs].contiguous()

    outputs, inputs = numbers.shape
    least: torch.Tensor | int = _INT8_ZERO
    if zeros is not None:
        least = by_row(_codes(zeros))
    return PackedWeight(_codes(numbers), inputs, 8, block[1], by_row(scales), least)


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8) ^ _INT8_ZERO


def _awq(form: AwqForm, stored: Stored) -> UnpackedArea:
    area = stored.around(len(_AWQ_COLUMNS), form.group)
    rows, columns = area
    groups, words = units(columns, form.group), units(rows, len(_AWQ_COLUMNS))
    codes = _in_columns(stored["qweight"][columns, words])
    zeros = _in_columns(stored["qzeros"][groups, words])
    scales = stored["scales"][groups, rows].T.contiguous()
    grouping = (area.shape[1], 4, form.group)
    codes = packed(codes.T, 4)
    return UnpackedArea(PackedWeight(codes, *grouping, scales, zeros.T.contiguous()), area)


def _in_columns(words: torch.Tensor) -> torch.Tensor:
    """Unpack columns: int32 `[rows, n]` -> uint8 `[rows, 8 n]`, in AWQ's order of columns."""
    numbers = unpacked(_bytes(words), 4).view(*words.shape, 8)
    ordered = torch.empty_like(numbers)
    ordered[..., list(_AWQ_COLUMNS)] = numbers
    return ordered.flatten(1)


class _Inputs(NamedTuple):
    """Inputs that are read, and how they share scales. groups: whose scales are read. group: inputs
    of each. order: as of PackedWeight. of_each: int64, the group of each input that is read,
    where neighbours are of any; None = they lie by group, in that order.
    """

    columns: slice
    groups: slice
    group: int
    order: torch.Tensor | None = None
    of_each: torch.Tensor | None = None

    def weight(
        self, codes: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | int
    ) -> PackedWeight:
        """Make the weight of the inputs that are read. codes: in the order in which they are
        stored; scales, zeros: `[rows, groups]`.
        """
        width, group = self.columns.stop - self.columns.start, self.group
        if self.order is not None:
            codes = packed(unpacked(codes, bits)[:, self.order], bits)
        if self.of_each is not None:
            group, scales = 1, scales[:, self.of_each]
            zeros = zeros[:, self.of_each] if isinstance(zeros, torch.Tensor) else zeros
        codes = codes[:, : -(-width * bits // 8)].contiguous()
        return PackedWeight(codes, width, bits, group, scales, zeros, order=self.order)


def _inputs(form: GptqForm | PackedForm, stored: Stored, index: str) -> _Inputs:
    """Find the inputs that are read, and their groups. index: the suffix of the tensor that has the
    group of each input. Some of the inputs that are sorted by group are of any group, so that
    each becomes a group of its own.
    """
    inputs, in_word = stored.shape[1], 32 // form.bits
    group, columns = form.group or inputs, stored.area.columns
    g_idx = stored.optional(index)
    order = None if g_idx is None else _order(g_idx, group, inputs)
    if order is None or g_idx is None:
        unit = in_word if group >= inputs else lcm(in_word, group)
        columns = around(columns, unit, inputs)
        return _Inputs(columns, units(columns, group), group)
    columns = around(columns, in_word, inputs)
    every = slice(0, -(-inputs // group))
    if columns == slice(0, inputs):
        return _Inputs(columns, every, group, order)
    return _Inputs(columns, every, group, of_each=g_idx[columns].long())


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


def _gptq(form: GptqForm, stored: Stored) -> UnpackedArea:
    in_word = 32 // form.bits
    inputs = _inputs(form, stored, "g_idx")
    rows = around(stored.area.rows, in_word, stored.shape[0])
    words = stored["qzeros"][inputs.groups, units(rows, in_word)]
    if form.zeros_less_one:  # whose writer subtracted from whole words, with their borrows
        words = words + _ONES[form.bits]
    zeros = _of_rows(words, form.bits, rows)
    codes = _bytes(stored["qweight"][units(inputs.columns, in_word), rows].T)
    scales = stored["scales"][inputs.groups, rows].T.contiguous()
    return UnpackedArea(inputs.weight(codes, form.bits, scales, zeros), Area(rows, inputs.columns))


def _of_rows(words: torch.Tensor, bits: int, rows: slice) -> torch.Tensor:
    """Unpack rows: int32 `[groups, words]`, each of neighbouring rows -> uint8 `[rows, groups]`."""
    return unpacked(_bytes(words), bits)[:, : rows.stop - rows.start].T.contiguous()


def _pack_quantized(form: PackedForm, stored: Stored) -> UnpackedArea:
    shape = stored.optional("weight_shape")
    if shape is not None and shape.tolist() != [*stored.shape]:
        raise ValueError(f"weight_shape is {shape.tolist()}, expected {[*stored.shape]}")
    in_word = 32 // form.bits
    inputs, rows = _inputs(form, stored, "weight_g_idx"), stored.area.rows
    zeros: torch.Tensor | int = 1 << form.bits - 1
    if form.asymmetric:
        rows = around(rows, in_word, stored.shape[0])
        words = stored["weight_zero_point"][units(rows, in_word), inputs.groups]
        zeros = _of_rows(words.T, form.bits, rows)
    scales = stored["weight_scale"]
    if form.scales == "tensor":
        scales = scales.view(1, 1).expand(rows.stop - rows.start, -1).contiguous()
    else:
        scales = scales[rows, inputs.groups].contiguous()
    codes = _bytes(stored["weight_packed"][rows, units(inputs.columns, in_word)])
    return UnpackedArea(inputs.weight(codes, form.bits, scales, zeros), Area(rows, inputs.columns))


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """View words as bytes: int32 `[rows, n]` -> uint8 `[rows, 4 n]`, the lowest bits first."""
    if words.stride(-1) != 1:  # contiguous or not, where there is one column
        words = words.clone(memory_format=torch.contiguous_format)
    return words.contiguous().view(torch.uint8)


def grouped(blocks: torch.Tensor, scales: torch.Tensor, area: Area) -> UnpackedArea:
    """An area without unpacking. blocks: uint8 `[rows, n, 16]` or `[rows, 16 n]`, the lower four
    bits first. scales: uint8 `[rows, n]`, powers of two, which become bfloat16: it has all of them,
    and values have two significant bits. So all is exact."""
    rows, inputs = scales.shape[0], scales.shape[1] * MXFP4_BLOCK
    area = Area(area.rows, around(area.columns, MXFP4_BLOCK, inputs))
    mine = area.rows, units(area.columns, MXFP4_BLOCK)
    exponents = scales[mine].to(torch.int32) - SCALE_BIAS
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents).bfloat16()
    table = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    codes = blocks.reshape(rows, scales.shape[1], -1)[mine].flatten(1).contiguous()
    weight = PackedWeight(codes, area.shape[1], 4, MXFP4_BLOCK, powers, table=table)
    return UnpackedArea(weight, area)


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
