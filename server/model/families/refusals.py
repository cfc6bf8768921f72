"""The kinds of models that are served, and why others are not: type, head, stored form. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from loraplex.adapters.violations import shown
from loraplex.server.model.families.head_forms import head_form
from loraplex.server.model.families.missing_parts import missing_part

_LISTED = "`loraplex info` lists what is"


def other_family(config: Mapping[str, Any], families: Collection[str]) -> str | None:
    """The one reason that counts for a model of another type: its other settings mean nothing.
    families: the values of `model_type` that are served."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in families:
        return None
    if model_type is None:
        return f"config.json names no model_type; {_LISTED}"
    part = missing_part(config)
    because = f": it needs {part}" if part else f"; {_LISTED}"
    return f"model type {shown(model_type)} is not served{because}"


def other_forms(
    config: Mapping[str, Any], architecture: str, *, for_vectors: bool = False
) -> list[str]:
    """Reasons of a model of a served type: another head, MLX's weights, code of its own.
    architecture: the class that is served. for_vectors: as of `read_model`."""
    has_no_head = for_vectors or head_form(config, architecture) == "none"
    reasons = (
        _head(config, architecture),
        _of_mlx(config),
        _own_code(config, architecture),
        _own_body(config) if has_no_head else None,
    )
    return [reason for reason in reasons if reason is not None]


def _head(config: Mapping[str, Any], served: str) -> str | None:
    named = config.get("architectures") or []
    if not isinstance(named, list):
        return f"architectures must be a list of names, got {shown(named)}"
    if head_form(config, served) is not None:
        return None
    found = ", ".join(map(str, named))[:160]
    if any("bidirectional" in str(name).lower() for name in named):
        return f"architectures: {shown(found)} attends to later tokens, too; served is {served}"
    return f"architectures: {shown(found)} is no form that is served; served is {served}"


def _of_mlx(config: Mapping[str, Any]) -> str | None:
    if not config.get("quantization"):
        return None
    return "quantization: quantised weights (MLX) are not served; serve the original"


def _own_code(config: Mapping[str, Any], served: str) -> str | None:
    """Code beside the weights under the name of a class that transformers has is left out, as
    transformers leaves it out: what is computed is the library's."""
    codes = config.get("auto_map") or {}
    if not isinstance(codes, Mapping):
        return f"auto_map must be a table, got {shown(codes)}"
    code = codes.get("AutoModelForCausalLM")
    if code is None and head_form(config, served) == "classes":
        code = codes.get("AutoModelForSequenceClassification")
        served = str((config.get("architectures") or [""])[0])
    if code is None or str(code).rpartition(".")[2].lower() == served.lower():
        return None
    return f"auto_map: the model needs code of its own ({shown(code)}), which is never run"


def _own_body(config: Mapping[str, Any]) -> str | None:
    """The code that a model for vectors brings, if any; such a body may attend both ways.

    GTE-Qwen2's does so under the library's own name.
    """
    codes = config.get("auto_map")
    code = codes.get("AutoModel") if isinstance(codes, Mapping) else None
    if code is None:
        return None
    return (
        f"auto_map: its vectors need code of its own ({shown(code)}), which is never run and may "
        "attend to later tokens"
    )
