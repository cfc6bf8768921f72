"""FP8 checkpoints of `quant_method` `fp8` and `fbgemm_fp8`. Pure."""

from loraplex.server.model.quantisation.forms import INVERSE, EightBitForm
from loraplex.server.model.quantisation.quantisation import Quantisation, of_every_module
from loraplex.server.model.quantisation.settings import Table, one_of


def read_fp8(table: Table) -> Quantisation:
    """Read FP8's configuration. One scale for each matrix, or for each block (DeepSeek's form,
    whose scales are called inverse and multiply).
    """
    one_of(table, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    one_of(table, "activation_scheme", ("dynamic", "static"), "dynamic")
    size = table.get("weight_block_size")
    if size is None:
        return of_every_module("FP8, one scale a matrix", EightBitForm("fp8", "tensor"))
    rows, columns = block_of(size, "weight_block_size")
    form = EightBitForm("fp8", "block", (rows, columns), scale=INVERSE)
    return of_every_module(f"FP8 in blocks of {rows} x {columns}", form)


def read_fbgemm(table: Table) -> Quantisation:
    """A scale for each output."""
    return of_every_module("FP8, a scale for each output", EightBitForm("fp8", "channel"))


def block_of(value: object, key: str) -> tuple[int, int]:
    """Read the size of a block: rows and columns."""
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ValueError(f"{key} must be two positive integers, got {value!r}")
