"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and Optimum write them. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from loraplex.server.model.quantisation.forms import GptqForm
from loraplex.server.model.quantisation.quantisation import Quantisation, QuantisationRule
from loraplex.server.model.quantisation.settings import Table, bits, flag, group_size, inner, one_of

_WITHOUT, _WITH = "-:", "+:"


def read_gptq(table: Table) -> Quantisation:
    """`dynamic` overrides the settings of modules whose paths match: the first pattern counts."""
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
