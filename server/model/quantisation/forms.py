"""The forms in which a checkpoint holds a quantised matrix: which tensors, of which shapes. Pure.

A matrix is `[out_features, in_features]`. Names are those of the format's own writer.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

import msgspec

from loraplex.adapters.safetensors.header import TensorInfo

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
FP8, INT8, UINT8, INT32 = (frozenset({name}) for name in ("F8_E4M3", "I8", "U8", "I32"))
_INDICES = frozenset({"I32", "I64"})
_SCALES = FLOATS | {"F8_E8M0"}
# What a 4-bit checkpoint of bitsandbytes may call its bytes (`bnb_4bit_quant_storage`).
_BYTES = FLOATS | UINT8 | INT8

# How DeepSeek calls the scales of FP8; they multiply all the same.
INVERSE = "weight_scale_inv"

# How writers call the one scale of all inputs.
INPUT_SCALES = ("input_scale", "activation_scale", "act_scale")

# The usual block of bitsandbytes' 4 bits.
FOUR_BIT_BLOCK = 64

Scales = Literal["tensor", "channel", "group", "block"]
Shape = tuple[int, ...]


class TensorForm(NamedTuple):
    """One tensor. suffix: behind the module's path, or the whole name. shapes: those that it may
    have, none = any, which the reader of the form checks. dtypes: as safetensors spells them."""

    suffix: str
    dtypes: frozenset[str]
    shapes: tuple[Shape, ...]
    optional: bool = False

    def fits(self, stored: TensorInfo) -> bool:
        return stored.dtype in self.dtypes and (not self.shapes or stored.shape in self.shapes)


class InputForm(msgspec.Struct, frozen=True):
    """How inputs of a product become numbers of eight bits: `number * scale`.

    scales: one for each token, for each `group` inputs of a token, or the one that the checkpoint
    has. most: the largest magnitude that a token's scale covers; None = any.
    """

    scales: Literal["token", "group", "tensor"]
    group: int = 0
    most: float | None = None
    numbers: Literal["fp8", "int8"] = "fp8"


class EightBitForm(msgspec.Struct, frozen=True):
    """FP8 (E4M3) or int8 numbers and their scales: `weight * scale`.

    scales: one for the matrix, for each output, for `block[1]` inputs of each output, or for each
    `block`. block: rows and columns. scale: the tensor's name. asymmetric: int8 with zero points.
    inputs: how those of products are rounded; None = not at all.
    """

    numbers: Literal["fp8", "int8"]
    scales: Scales
    block: tuple[int, int] = (1, 1)
    scale: str = "weight_scale"
    asymmetric: bool = False
    inputs: InputForm | None = None

    @property
    def marker(self) -> TensorForm:
        return TensorForm("weight", FP8 if self.numbers == "fp8" else INT8, ())

    def scale_shapes(self, out_features: int, in_features: int) -> tuple[Shape, ...]:
        rows, columns = self.block
        if self.scales == "tensor":
            return ((), (1,), (1, 1))
        if self.scales == "channel":
            return ((out_features, 1), (out_features,))
        if self.scales == "group":
            rows = 1
        return ((-(-out_features // rows), -(-in_features // columns)),)

    def tensors(self, out_features: int, in_features: int) -> Iterator[TensorForm]:
        shapes = self.scale_shapes(out_features, in_features)
        yield self.marker._replace(shapes=((out_features, in_features),))
        yield TensorForm(self.scale, _SCALES, shapes)
        if self.asymmetric:
            yield TensorForm("weight_zero_point", INT8, shapes)
        for suffix in (*INPUT_SCALES, "input_scale_ub"):
            yield TensorForm(suffix, FLOATS, (), optional=True)
        yield TensorForm("input_zero_point", INT8, (), optional=True)


class AwqForm(msgspec.Struct, frozen=True):
    """AWQ's `gemm` layout: four bits, `(code - zero) * scale`, groups of `group` inputs."""

    group: int

    @property
    def marker(self) -> TensorForm:
        return TensorForm("qweight", INT32, ())

    def tensors(self, out_features: int, in_features: int) -> Iterator[TensorForm]:
        groups = _groups(in_features, self.group)
        words = -(-out_features // 8)
        yield self.marker._replace(shapes=((in_features, words),))
        yield TensorForm("qzeros", INT32, ((groups, words),))
        yield TensorForm("scales", FLOATS, ((groups, out_features),))
        yield TensorForm("bias", FLOATS, ((out_features,),), optional=True)


class GptqForm(msgspec.Struct, frozen=True):
    """Form of weights in GPTQ's layout. GPTQ: `(code - zero) * scale`. group: inputs that share a
    scale, None = all of an output's. zeros_less_one: they are stored as in version 1, less one.
    """

    bits: Literal[4, 8]
    group: int | None
    zeros_less_one: bool

    @property
    def marker(self) -> TensorForm:
        return TensorForm("qweight", INT32, ())

    def tensors(self, out_features: int, in_features: int) -> Iterator[TensorForm]:
        in_word = 32 // self.bits
        groups = _groups(in_features, self.group)
        yield self.marker._replace(shapes=((-(-in_features // in_word), out_features),))
        yield TensorForm("qzeros", INT32, ((groups, -(-out_features // in_word)),))
        yield TensorForm("scales", FLOATS, ((groups, out_features),))
        yield TensorForm("g_idx", _INDICES, ((in_features,),), optional=True)
        yield TensorForm("bias", FLOATS, ((out_features,),), optional=True)


class PackedForm(msgspec.Struct, frozen=True):
    """compressed-tensors' `pack-quantized`: `(code - zero) * scale`. group: as of GptqForm."""

    bits: Literal[4, 8]
    scales: Literal["tensor", "channel", "group"]
    group: int | None
    asymmetric: bool

    @property
    def marker(self) -> TensorForm:
        return TensorForm("weight_packed", INT32, ())

    def tensors(self, out_features: int, in_features: int) -> Iterator[TensorForm]:
        in_word = 32 // self.bits
        groups = _groups(in_features, self.group)
        shapes: tuple[Shape, ...] = ((out_features, groups),)
        if self.scales == "tensor":
            shapes = ((), (1,), (1, 1))
        yield self.marker._replace(shapes=((out_features, -(-in_features // in_word)),))
        yield TensorForm("weight_scale", FLOATS, shapes)
        yield TensorForm("weight_shape", _INDICES, ((2,),), optional=True)
        yield TensorForm("weight_g_idx", _INDICES, ((in_features,),), optional=True)
        if self.asymmetric:
            zeros = (-(-out_features // in_word), groups)
            yield TensorForm("weight_zero_point", INT32, (zeros,))


class FourBitForm(msgspec.Struct, frozen=True):
    """bitsandbytes' NF4 or FP4: codes of a table, and a scale for each block of the flat matrix.
    How large blocks are stands in a JSON text beside them."""

    numbers: Literal["nf4", "fp4"]

    @property
    def marker(self) -> TensorForm:
        return TensorForm("weight.absmax", FLOATS | UINT8, ())

    @property
    def state(self) -> str:
        """The suffix of the JSON text."""
        return f"weight.quant_state.bitsandbytes__{self.numbers}"

    def tensors(self, out_features: int, in_features: int) -> Iterator[TensorForm]:
        yield TensorForm("weight", _BYTES, ())
        yield self.marker
        yield TensorForm("weight.quant_map", FLOATS, ((16,),))
        yield TensorForm(self.state, UINT8, ())
        yield TensorForm("weight.nested_absmax", FLOATS, (), optional=True)
        yield TensorForm("weight.nested_quant_map", FLOATS, ((256,),), optional=True)


class Fp4Form(msgspec.Struct, frozen=True):
    """FP4 (E2M1), two numbers in a byte, with a scale for each `group` inputs: E4M3 and one float32
    for the matrix (NVFP4), or powers of two (MXFP4).

    codes, whole: names of tensors, that of the matrix's float32; None = there is none. divides: it
    divides.
    """

    group: Literal[16, 32]
    codes: str = "weight_packed"
    whole: str | None = None
    divides: bool = False

    @property
    def marker(self) -> TensorForm:
        return TensorForm(self.codes, UINT8, ())

    def tensors(self, out_features: int, in_features: int) -> Iterator[TensorForm]:
        scales = UINT8 if self.whole is None else FP8
        groups = _groups(in_features, self.group)
        yield self.marker._replace(shapes=((out_features, in_features // 2),))
        yield TensorForm("weight_scale", scales, ((out_features, groups),))
        if self.whole is not None:
            yield TensorForm(self.whole, FLOATS, ((), (1,)))
        # Of inputs, which are not rounded.
        for suffix in ("input_scale", "input_global_scale"):
            yield TensorForm(suffix, FLOATS, (), optional=True)


class RowwiseForm(msgspec.Struct, frozen=True):
    """bitsandbytes' int8: `weight * SCB / 127`, a scale for each output."""

    @property
    def marker(self) -> TensorForm:
        return TensorForm("SCB", FLOATS, ())

    def tensors(self, out_features: int, in_features: int) -> Iterator[TensorForm]:
        yield TensorForm("weight", INT8, ((out_features, in_features),))
        yield self.marker._replace(shapes=((out_features,),))
        yield TensorForm("weight_format", UINT8, ((), (1,)), optional=True)


WeightForm = EightBitForm | AwqForm | GptqForm | PackedForm | FourBitForm | Fp4Form | RowwiseForm


def input_form(form: WeightForm | None) -> InputForm | None:
    """How inputs of a product with a matrix of this form are rounded; None = not at all."""
    return form.inputs if isinstance(form, EightBitForm) else None


def multiplies_rounded(form: WeightForm) -> bool:
    """Whether products with a matrix of this form multiply its numbers of eight bits as they are,
    with rounded inputs."""
    if not isinstance(form, EightBitForm) or form.inputs is None or form.asymmetric:
        return False
    group = 0 if form.scales in ("tensor", "channel") else form.block[1]
    return (form.inputs.numbers, form.inputs.group) == (form.numbers, group)


def _groups(in_features: int, group: int | None) -> int:
    """Number of groups in a row. group: inputs that share a scale, None = all."""
    return 1 if group is None else -(-in_features // group)


def packed_bytes(form: WeightForm, out_features: int, in_features: int) -> int:
    """Bytes of a matrix of this form while it stays quantised, about."""
    if isinstance(form, FourBitForm):
        numbers = out_features * in_features
        return numbers // 2 + 4 * (numbers // FOUR_BIT_BLOCK)
    if isinstance(form, Fp4Form):
        wide = 2 if form.whole is None else 4
        return out_features * in_features // 2 + wide * out_features * in_features // form.group
    wide = 4 if isinstance(form, EightBitForm) else 2
    return sum(
        prod(tensor.shapes[0])
        * (wide if tensor.dtypes >= FLOATS else 4 if tensor.dtypes == INT32 else 1)
        for tensor in form.tensors(out_features, in_features)
        if tensor.shapes and not tensor.optional
    )
