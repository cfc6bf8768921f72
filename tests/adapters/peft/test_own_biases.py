"""Biases in place of the base's, as PEFT saves them, and what is wrong with them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.validate import AdapterLimits
from tests.adapter_folders import (
    adapter_config,
    lora_tensors,
    safetensors_bytes,
    small_base,
    write_config,
)
from tests.adapters.refusals import violation_codes

LIMITS = AdapterLimits()
_PLAIN = small_base()
# q, k and v have biases, as in Qwen2.
MODULES = {
    name: msgspec.structs.replace(shape, has_bias=name in ("q_proj", "k_proj", "v_proj"))
    for name, shape in _PLAIN.modules_of(0).items()
}
BASE = msgspec.structs.replace(
    _PLAIN,
    layers=tuple(msgspec.structs.replace(layer, modules=MODULES) for layer in _PLAIN.layers),
)
LAYER = "base_model.model.model.layers.0.self_attn"
HIDDEN = BASE.hidden_size
KV = MODULES["k_proj"].out_features


def written(folder: Path, biases: dict[str, Any], **config: Any) -> Path:
    folder.mkdir()
    tensors = lora_tensors(BASE, targets=("q_proj",))
    for name, values in biases.items():
        tensors[f"{LAYER}.{name}"] = np.resize(np.float32(values[1]), values[0])
    write_config(folder, adapter_config(BASE, 8, ["q_proj"]) | config)
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


Q_BIAS = {"q_proj.base_layer.bias": (HIDDEN, 1)}


def test_of_targets(tmp_path: Path) -> None:
    judged = judge_folder(written(tmp_path / "a", Q_BIAS, bias="lora_only"), BASE, LIMITS)
    assert [(bias.layer, bias.module) for bias in judged.tensors.biases] == [(0, "q_proj")]
    assert judged.manifest.targets == ("q_proj",)


def test_of_all_modules(tmp_path: Path) -> None:
    biases = {**Q_BIAS, "k_proj.bias": (KV, 2)}
    judged = judge_folder(written(tmp_path / "a", biases, bias="all"), BASE, LIMITS)
    assert [bias.module for bias in judged.tensors.biases] == ["q_proj", "k_proj"]
    assert judged.manifest.targets == ("k_proj", "q_proj")
    assert judged.manifest.nbytes == sum(tensor.nbytes for tensor in judged.tensors.tensors)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_none_saved_is_what_peft_saved_for_years(bias: str, tmp_path: Path) -> None:
    judged = judge_folder(written(tmp_path / "a", {}, bias=bias), BASE, LIMITS)
    assert judged.tensors.biases == ()


def test_without_a_base_any_module_may_have_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", Q_BIAS, bias="lora_only")
    assert len(judge_folder(folder).tensors.biases) == 1


@pytest.mark.parametrize(
    ("biases", "bias", "codes"),
    [
        (Q_BIAS, "none", {"unknown_tensor"}),
        ({"k_proj.bias": (KV, 1)}, "lora_only", {"untargeted_tensor"}),
        ({"q_proj.bias": (HIDDEN, 1)}, "all", {"misplaced_tensor"}),
        ({"k_proj.base_layer.bias": (KV, 1)}, "all", {"misplaced_tensor"}),
        ({**Q_BIAS, "q_proj.bias": (HIDDEN, 1)}, "all", {"duplicate_tensor"}),
        ({"o_proj.bias": (HIDDEN, 1)}, "all", {"unknown_tensor"}),
        ({"k_proj.bias": (KV + 1, 1)}, "all", {"shape_mismatch"}),
        ({"k_proj.bias": ((KV, 1), 1)}, "all", {"shape_mismatch"}),
        ({"k_proj.bias": (KV, np.nan)}, "all", {"not_finite"}),
        (
            {"q_proj.bias": (3, np.inf), "o_proj.bias": (HIDDEN, 1)},
            "all",
            {"misplaced_tensor", "not_finite", "unknown_tensor"},
        ),
    ],
)
def test_all_that_is_wrong_is_said(
    biases: dict[str, Any], bias: str, codes: set[str], tmp_path: Path
) -> None:
    folder = written(tmp_path / "a", biases, bias=bias)
    assert violation_codes(lambda: judge_folder(folder, BASE, LIMITS)) == codes
