"""FP8 checkpoints of `quant_method` `fp8` and `fbgemm_fp8`. Pure."""

from math import inf

from loraplex.server.model.quantisation.forms import INVERSE, EightBitForm, InputForm
from loraplex.server.model.quantisation.quantisation import Quantisation, of_every_module
from loraplex.server.model.quantisation.settings import Table, one_of


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
