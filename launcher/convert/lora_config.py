"""The config of a LoRA adapter whose modules and ranks are known. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

PREFIX = "base_model.model."
_LAYER = re.compile(r"model\.layers\.(?P<layer>0|[1-9]\d{0,5})\.(?P<rest>.+)")


def lora_config(base_name: str, ranks: Mapping[str, int], scale: float) -> dict[str, Any]:
    """`adapter_config.json`. ranks: of each module. scale: what B A x is multiplied with."""
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: each for path, each in ranks.items() if each != rank}
    targets, layers = _targets(ranks)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": _alpha(scale, rank),
        "rank_pattern": others,
        "alpha_pattern": {path: _alpha(scale, each) for path, each in others.items()},
        "target_modules": targets,
        "layers_to_transform": layers,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def within_layer(path: str) -> tuple[int, str] | None:
    """The layer of a module, and the module's name in the layer; None = it is in no layer."""
    found = _LAYER.fullmatch(path)
    return None if found is None else (int(found["layer"]), found["rest"])


def _alpha(scale: float, rank: int) -> float | int:
    alpha = scale * rank
    return int(alpha) if float(alpha).is_integer() else alpha


def _targets(paths: Collection[str]) -> tuple[list[str], list[int] | None]:
    """The `target_modules` and `layers_to_transform` that name these modules alone."""
    places = {place for place in map(within_layer, paths) if place is not None}
    layers = sorted({layer for layer, _ in places})
    rests = {rest for _, rest in places}
    names = sorted({rest.rpartition(".")[2] for rest in rests})
    is_whole = len(places) == len(paths) == len(layers) * len(rests)
    if is_whole and len(names) == len(rests):
        return names, layers
    return sorted(paths), None
