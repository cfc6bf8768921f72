"""From the table `quantization_config` to a Quantisation; the forms of compressed-tensors, which
llm-compressor writes, and of `fp8` and `fbgemm_fp8` included. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from loraplex.server.model.quantisation.forms import (
    INVERSE,
    AwqForm,
    EightBitForm,
    FourBitForm,
    Fp4Form,
    GptqForm,
    InputForm,
    PackedForm,
    RowwiseForm,
    Scales,
    WeightForm,
)
from loraplex.server.model.quantisation.quantisation import (
    Quantisation,
    QuantisationRule,
    of_every_module,
)
from loraplex.server.model.quantisation.settings import Table, bits, flag, group_size, inner, one_of

_PATTERN = "re:"
_EVERY = ("Linear",)
_FORMATS = (
    *("pack-quantized", "float-quantized", "int-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)
_MIXED = "mixed-precision"

_WITHOUT, _WITH = "-:", "+:"


def read_fp8(table: Table) -> Quantisation:
    """Read FP8's configuration. One scale for each matrix, or for each block (DeepSeek's form,
    whose scales are called inverse and multiply).
    """
    one_of(table, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    usual = "static" if table.get("quant_algo") else "dynamic"  # ModelOpt's are measured
    measured = one_of(table, "activation_scheme", ("dynamic", "static"), usual) == "static"
    size = table.get("weight_block_size")
    if size is None:
        inputs = InputForm("tensor" if measured else "token")
        form = EightBitForm("fp8", "tensor", inputs=inputs)
        return of_every_module("FP8, one scale a matrix", form)
    rows, columns = block_of(size, "weight_block_size")
    inputs = InputForm("tensor") if measured else InputForm("group", columns)
    form = EightBitForm("fp8", "block", (rows, columns), scale=INVERSE, inputs=inputs)
    return of_every_module(f"FP8 in blocks of {rows} x {columns}", form)


def read_fbgemm(table: Table) -> Quantisation:
    """A scale for each output; tokens' scales cover no more than a bound."""
    most = table.get("activation_scale_ub", 1200.0)
    if not isinstance(most, int | float) or not 0 < most < inf:
        raise ValueError(f"activation_scale_ub must be a positive number, got {most!r}")
    form = EightBitForm("fp8", "channel", inputs=InputForm("token", most=float(most)))
    return of_every_module("FP8, a scale for each output", form)


def block_of(value: object, key: str) -> tuple[int, int]:
    """Read the size of a block: rows and columns."""
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ValueError(f"{key} must be two positive integers, got {value!r}")


class _Group(NamedTuple):
    """Modules that are quantised alike. scheme: for people."""

    targets: tuple[str, ...]
    form: WeightForm
    scheme: str


def read_compressed_tensors(table: Table) -> Quantisation:
    """Groups of modules, each with a scheme: those with a name win over those with a pattern, and
    both over classes of modules. What is ignored shows in the tensors."""
    _refuse_other_maths(table)
    groups = [_group(table, name, inner(table["config_groups"], name)) for name in _names(table)]
    ranked = sorted(_rules(groups), key=lambda item: item[0])
    schemes = dict.fromkeys(group.scheme for group in groups)
    return Quantisation(
        f"{' and '.join(schemes)} (compressed-tensors)", tuple(rule for _, rule in ranked)
    )


def _refuse_other_maths(table: Table) -> None:
    status = table.get("quantization_status")
    if status not in (None, "compressed"):
        raise ValueError(f"quantization_status must be compressed, got {status!r}")
    sparse = inner(table, "sparsity_config").get("format")
    if sparse not in (None, "dense"):
        raise ValueError(f"sparsity_config: the format {sparse!r} is not served")
    if inner(table, "transform_config").get("config_groups"):
        raise ValueError("transform_config: rotations of activations are not served")


def _names(table: Table) -> list[str]:
    names = list(inner(table, "config_groups"))
    if not names:
        raise ValueError("config_groups must name a group")
    return names


def _rules(groups: list[_Group]) -> Iterator[tuple[int, QuantisationRule]]:
    for group in groups:
        for target in group.targets:
            if target in _EVERY:
                yield 2, QuantisationRule(None, group.form)
            elif target.startswith(_PATTERN):
                yield 1, QuantisationRule(_checked(target.removeprefix(_PATTERN)), group.form)
            else:
                yield 0, QuantisationRule(re.escape(target) + r"\Z", group.form)


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"targets: {pattern!r} is no regular expression ({error})") from None
    return pattern


def _group(table: Table, name: str, group: Table) -> _Group:
    targets, weights = group.get("targets"), group.get("weights")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ValueError(f"{name}: targets must be a list of names, got {targets!r}")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{name}: weights must be a table, got {weights!r}")
    own = group if group.get("format") is not None else table
    if own is table and table.get("format") == _MIXED:
        raise ValueError(f"{name}: format is missing")
    layout = one_of(own, "format", _FORMATS)
    form: PackedForm | EightBitForm | Fp4Form
    match layout:
        case "pack-quantized":
            form = _packed(weights)
        case "nvfp4-pack-quantized" | "mxfp4-pack-quantized":
            form = _four_bit_floats(weights, layout)
        case _:
            form = _eight_bits(weights, _inputs(inner(group, "input_activations")))
    return _Group(tuple(targets), form, _scheme(form))


def _packed(weights: Table) -> PackedForm:
    one_of(weights, "type", ("int",), "int")
    width = cast(Literal[4, 8], bits(weights, "num_bits", served=(4, 8)))
    scales = one_of(weights, "strategy", ("tensor", "channel", "group"), _usual(weights))
    asymmetric = not flag(weights, "symmetric", True)
    if scales == "tensor" and asymmetric:
        raise ValueError("weights: zero points need a scale for each output or group")
    size = group_size(weights, "group_size") if scales == "group" else None
    return PackedForm(width, cast(Literal["tensor", "channel", "group"], scales), size, asymmetric)


def _four_bit_floats(weights: Table, layout: str) -> Fp4Form:
    """Inputs that such a checkpoint rounds to FP4 stay as they are."""
    one_of(weights, "type", ("float",), "float")
    bits(weights, "num_bits", served=(4,))
    if not flag(weights, "symmetric", True):
        raise ValueError("weights: FP4 has no zero points")
    form = Fp4Form(32)
    if layout == "nvfp4-pack-quantized":
        form = Fp4Form(16, whole="weight_global_scale", divides=True)
    size = group_size(weights, "group_size", default=form.group)
    if size != form.group:
        raise ValueError(f"group_size must be {form.group} in {layout}, got {size}")
    return form


def _inputs(table: Table) -> InputForm | None:
    """How inputs are rounded. A scale of all tokens of a batch would make a token's result depend
    on its neighbours: each token has its own. Inputs with zero points stay as they are.
    """
    if not table:
        return None
    numbers: Literal["fp8", "int8"] = "int8"
    if one_of(table, "type", ("int", "float"), "int") == "float":
        numbers = "fp8"
    elif not flag(table, "symmetric", True):
        return None
    bits(table, "num_bits", served=(8,))
    names = ("token", "group", "tensor")
    scales = cast(Literal["token", "group", "tensor"], one_of(table, "strategy", names, "tensor"))
    if scales == "group":
        size = group_size(table, "group_size", default=128) or 0
        return InputForm("group", size, numbers=numbers)
    is_dynamic = table.get("dynamic") not in (None, False)
    return InputForm("token" if is_dynamic else scales, numbers=numbers)


def _eight_bits(weights: Table, inputs: InputForm | None) -> EightBitForm:
    bits(weights, "num_bits", served=(8,))
    is_float = one_of(weights, "type", ("int", "float"), "int") == "float"
    names = ("tensor", "channel", "group", "block")
    scales = cast(Scales, one_of(weights, "strategy", names, _usual(weights)))
    block = (1, 1)
    if scales == "block":
        block = block_of(weights.get("block_structure"), "block_structure")
    elif scales == "group":
        block = (1, group_size(weights, "group_size", default=128) or 1)
    asymmetric = not flag(weights, "symmetric", True)
    if is_float and asymmetric:
        raise ValueError("weights: FP8 has no zero points")
    if is_float:
        return EightBitForm("fp8", scales, block, inputs=inputs)
    return EightBitForm("int8", scales, block, asymmetric=asymmetric, inputs=inputs)


def _usual(weights: Table) -> str:
    return "tensor" if weights.get("group_size") is None else "group"


def _scheme(form: PackedForm | EightBitForm | Fp4Form) -> str:
    if isinstance(form, Fp4Form):
        return "MXFP4" if form.whole is None else "NVFP4"
    if isinstance(form, PackedForm):
        name = f"int{form.bits}"
        return name if form.group is None else f"{name} in groups of {form.group}"
    name = {"fp8": "FP8", "int8": "int8"}[form.numbers]
    parts = {
        "tensor": "one scale a matrix",
        "channel": "a scale for each output",
        "group": f"groups of {form.block[1]}",
        "block": f"blocks of {form.block[0]} x {form.block[1]}",
    }
    return f"{name}, {parts[form.scales]}"


def read_gptq(table: Table) -> Quantisation:
    """Read GPTQ's configuration. `dynamic` overrides the settings of modules whose paths match: the
    first pattern counts.
    """
    one_of(table, "pack_dtype", ("int32",), "int32")
    form = _form(table)
    rules = [_override(table, *item) for item in inner(table, "dynamic").items()]
    group = "all inputs" if form.group is None else str(form.group)
    scheme = f"GPTQ, {form.bits} bits in groups of {group}"
    return Quantisation(scheme, (*rules, QuantisationRule(None, form)))


def _form(table: Table) -> GptqForm:
    flag(table, "desc_act", False)
    flag(table, "sym", True)
    named = "checkpoint_format" if table.get("checkpoint_format") is not None else "format"
    layout = one_of(table, named, ("gptq", "gptq_v2"), "gptq")
    width = cast(Literal[4, 8], bits(table, "bits", served=(4, 8)))
    return GptqForm(width, group_size(table, "group_size", default=128), layout == "gptq")


def _override(table: Table, pattern: str, changes: Any) -> QuantisationRule:
    expression = pattern.removeprefix(_WITHOUT).removeprefix(_WITH)
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"dynamic: {pattern!r} is no regular expression ({error})") from None
    if pattern.startswith(_WITHOUT):
        return QuantisationRule(expression, None)
    if not isinstance(changes, Mapping):
        raise ValueError(f"dynamic: {pattern!r} must have a table, got {changes!r}")
    return QuantisationRule(expression, _form({**table, **changes}))


def read_bitsandbytes(table: Table) -> Quantisation:
    if flag(table, "load_in_4bit", False) or flag(table, "_load_in_4bit", False):
        numbers = one_of(table, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        form = FourBitForm("nf4" if numbers == "nf4" else "fp4")
        return of_every_module(f"{numbers.upper()} (bitsandbytes)", form)
    if flag(table, "load_in_8bit", False) or flag(table, "_load_in_8bit", False):
        return of_every_module("int8, a scale for each output (bitsandbytes)", RowwiseForm())
    raise ValueError("load_in_4bit or load_in_8bit must be true")


def read_awq(table: Table) -> Quantisation:
    """The layout `gemm` alone: the others permute what it does not."""
    bits(table, "bits", "w_bit", served=(4,))
    named = "version" if table.get("version") is not None else "format"
    one_of(table, named, ("gemm",), "gemm")
    if not flag(table, "zero_point", True):
        raise ValueError("zero_point must be true, got False")
    size = group_size(table, "group_size", "q_group_size", default=128)
    if size is None:
        raise ValueError("group_size must be positive, got -1")
    return of_every_module(f"AWQ, 4 bits in groups of {size}", AwqForm(size))


def read_modelopt(table: Table) -> Quantisation:
    """ModelOpt's FP8 and NVFP4. What it leaves out shows in the tensors."""
    if one_of(table, "quant_algo", ("fp8", "nvfp4")) == "fp8":
        return read_fp8({**table, "activation_scheme": "static"})
    if group_size(table, "group_size", default=16) != 16:
        raise ValueError(f"group_size must be 16, got {table['group_size']}")
    return of_every_module("NVFP4", Fp4Form(16, codes="weight", whole="weight_scale_2"))


# By `quant_method`, or `quant_algo` where that is all.
_METHODS: MappingProxyType[str, Callable[[Table], Quantisation]] = MappingProxyType(
    {
        "awq": read_awq,
        "bitsandbytes": read_bitsandbytes,
        "compressed-tensors": read_compressed_tensors,
        "fbgemm_fp8": read_fbgemm,
        "fp8": read_fp8,
        "gptq": read_gptq,
        "modelopt": read_modelopt,
        "modelopt_fp4": read_modelopt,
        "nvfp4": read_modelopt,
    }
)
READ = "FP8, NVFP4, AWQ, GPTQ, bitsandbytes and compressed-tensors (FP8, FP4, int4, int8)"


def read_quantisation(table: Table) -> Quantisation:
    """Read how a configuration's weights are quantised. Raises ValueError, with the scheme's name
    and those that are read where it is another.
    """
    method = table.get("quant_method") or table.get("quant_algo") or "unnamed"
    read = _METHODS.get(method.lower()) if isinstance(method, str) else None
    if read is None:
        raise ValueError(
            f"quantised weights ({method!r:.100}) are not served; of quantised weights {READ} are"
            " read: serve one of these or the original"
        )
    try:
        return read(table)
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from None
