"""Checkpoints that bitsandbytes quantised. Pure."""

from loraplex.server.model.quantisation.forms import FourBitForm, RowwiseForm
from loraplex.server.model.quantisation.quantisation import Quantisation, of_every_module
from loraplex.server.model.quantisation.settings import Table, flag, one_of


def read_bitsandbytes(table: Table) -> Quantisation:
    if flag(table, "load_in_4bit", False) or flag(table, "_load_in_4bit", False):
        numbers = one_of(table, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        form = FourBitForm("nf4" if numbers == "nf4" else "fp4")
        return of_every_module(f"{numbers.upper()} (bitsandbytes)", form)
    if flag(table, "load_in_8bit", False) or flag(table, "_load_in_8bit", False):
        return of_every_module("int8, a scale for each output (bitsandbytes)", RowwiseForm())
    raise ValueError("load_in_4bit or load_in_8bit must be true")
