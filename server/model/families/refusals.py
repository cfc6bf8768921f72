"""The kinds of models that are served, and why others are not: type, head, stored form. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from adapters.violations import shown

# What MLX writes beside, or in place of, `quantization_config`.
_QUANTISED = ("quantization_config", "quantization")


def other_family(config: Mapping[str, Any], families: Sequence[str]) -> str | None:
    """The one reason that counts for a model of another type: its other settings mean nothing.
    families: the values of `model_type` that are served."""
    model_type = config.get("model_type")
    if model_type in families:
        return None
    served = f"served are {', '.join(families[:-1])} and {families[-1]}"
    if model_type is None:
        return f"config.json names no model_type; {served}"
    return f"model type {shown(model_type)} is not served; {served}"


def other_forms(config: Mapping[str, Any], architecture: str) -> list[str]:
    """Reasons of a model of a served type: another head, quantised weights, code of its own.
    architecture: the class that is served."""
    reasons = (_head(config, architecture), _quantised(config), _own_code(config))
    return [reason for reason in reasons if reason is not None]


def _head(config: Mapping[str, Any], served: str) -> str | None:
    named = config.get("architectures") or []
    if not named or served.lower() in (str(name).lower() for name in named):
        return None
    found = ", ".join(map(str, named))[:160]
    return f"architectures: {shown(found)} is no model that writes text; served is {served}"


def _quantised(config: Mapping[str, Any]) -> str | None:
    for key in _QUANTISED:
        table = config.get(key)
        if table:
            method = table.get("quant_method") or table.get("quant_algo") or "unnamed"
            return f"{key}: quantised weights ({shown(method)}) are not served; serve the original"
    return None


def _own_code(config: Mapping[str, Any]) -> str | None:
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        return "auto_map: the model needs code of its own, which is never run"
    return None
