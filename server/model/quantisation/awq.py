"""AWQ checkpoints, as AutoAWQ and GPTQModel write them. Pure."""

from loraplex.server.model.quantisation.forms import AwqForm
from loraplex.server.model.quantisation.quantisation import Quantisation, of_every_module
from loraplex.server.model.quantisation.settings import Table, bits, flag, group_size, one_of


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
