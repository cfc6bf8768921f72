"""From the table `quantization_config` to a Quantisation. Pure."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

from loraplex.server.model.quantisation.compressed_tensors import read_compressed_tensors
from loraplex.server.model.quantisation.forms import (
    AwqForm,
    FourBitForm,
    Fp4Form,
    GptqForm,
    RowwiseForm,
)
from loraplex.server.model.quantisation.fp8 import read_fbgemm, read_fp8
from loraplex.server.model.quantisation.quantisation import (
    Quantisation,
    QuantisationRule,
    of_every_module,
)
from loraplex.server.model.quantisation.settings import Table, bits, flag, group_size, inner, one_of

_WITHOUT, _WITH = "-:", "+:"


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
