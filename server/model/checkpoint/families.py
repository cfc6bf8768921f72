"""The kinds of models that are served, and why others are not: type, head, stored form. Pure."""

from collections.abc import Mapping
from typing import Any, Literal

from adapters.violations import shown

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What MLX writes beside, or in place of, `quantization_config`.
_QUANTISED = ("quantization_config", "quantization")


def other_family(config: Mapping[str, Any]) -> str | None:
    """The one reason that counts for a model of another type: its other settings mean nothing."""
    model_type = config.get("model_type")
    families: tuple[Family, ...] = tuple(ARCHITECTURES.values())
    if model_type in families:
        return None
    served = f"served are {', '.join(families[:-1])} and {families[-1]}"
    if model_type is None:
        return f"config.json names no model_type; {served}"
    return f"model type {shown(model_type)} is not served; {served}"


def other_forms(config: Mapping[str, Any], family: Family) -> list[str]:
    """Reasons of a model of a served type: another head, quantised weights, code of its own."""
    reasons = (_head(config, family), _quantised(config), _own_code(config))
    return [reason for reason in reasons if reason is not None]


def _head(config: Mapping[str, Any], family: Family) -> str | None:
    named = config.get("architectures") or []
    served = next(name for name, known in ARCHITECTURES.items() if known == family)
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
