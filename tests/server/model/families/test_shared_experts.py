"""Adapters on modules that PEFT wraps in no model: merging by hand is the oracle.

It takes the names of shared experts, and of dense layers beside experts, for the experts' alone
where transformers holds all experts in one tensor. Of Mamba's kin it refuses `out_proj`. Files of
other trainers mean them.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.spec.base_spec import base_spec
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.slabs import pack_folder

RANK, SCALE = 3, 2.0
MLP = ("gate_proj", "up_proj", "down_proj")
# A row of parity's table -> modules of the layers, `{}` for experts.
ROWS: dict[str, dict[int, tuple[str, ...]]] = {
    "qwen2-moe": {0: ("mlp.shared_expert",), 2: ("mlp.shared_expert", "mlp.experts.2")},
    "glm4-moe-dense-first": {
        0: ("mlp",),
        1: ("mlp",),
        2: ("mlp.shared_experts", "mlp.experts.0", "mlp.experts.7"),
    },
    "deepseek-v2-groups": {0: ("mlp",), 1: ("mlp.shared_experts", "mlp.experts.3")},
    "deepseek-v3": {0: ("mlp.experts.5",), 2: ("mlp.shared_experts", "mlp.experts.0")},
    "glm4-moe-lite": {1: ("mlp",), 2: ("mlp.shared_experts",)},
    "ernie-moe": {0: ("mlp.shared_experts",), 1: ("mlp.experts.1", "mlp.shared_experts")},
    "exaone-moe-dense-first": {0: ("mlp",), 1: ("mlp.shared_experts", "mlp.experts.3")},
    "qwen3-next": {0: ("mlp.shared_expert",), 2: ("mlp.experts.1", "mlp.shared_expert")},
    "qwen3.5-moe": {0: ("mlp.experts.6",), 1: ("mlp.shared_expert",)},
    "afmoe": {0: ("mlp",), 2: ("mlp.shared_experts", "mlp.experts.4")},
    "hunyuan-moe": {0: ("mlp.shared_mlp",), 1: ("mlp.shared_mlp", "mlp.experts.5")},
    "lfm2-moe": {0: ("feed_forward",), 1: ("feed_forward.experts.2",)},
    "nemotron-h-moe": {0: ("mixer.shared_experts", "mixer.experts.6")},
    "nemotron-h": {0: ("mixer",)},
    "falcon-h1": {0: ("mamba",), 2: ("mamba",)},
    "granite-h": {2: ("mamba",)},
}
# Others than MLP.
MODULES: dict[str, tuple[str, ...]] = {
    "lfm2-moe": ("w1", "w3", "w2"),
    "nemotron-h-moe": ("up_proj", "down_proj"),
    **dict.fromkeys(("nemotron-h", "falcon-h1", "granite-h"), ("in_proj", "out_proj")),
}
ALWAYS = ("glm4-moe-dense-first", "nemotron-h")
FEW = [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.exhaustive) for name in ROWS]


def place(model: PreTrainedModel, layer: int, block: str, name: str) -> torch.Tensor:
    """The weight of a module, which may lie in that of all experts."""
    weights = dict(model.named_parameters())
    stem = f"model.layers.{layer}.{block}"
    if f"{stem}.{name}.weight" in weights:
        return weights[f"{stem}.{name}.weight"]
    experts, _, expert = stem.rpartition(".")
    stacked = f"{experts}.{'down_proj' if name == 'w2' else name}"
    if stacked in weights:
        return weights[stacked][int(expert)]
    gate, up = weights[f"{experts}.gate_up_proj"][int(expert)].chunk(2)
    return gate if name in ("gate_proj", "w1") else up


def write(folder: Path, tensors: dict[str, torch.Tensor], targets: list[str]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FEW)
def test_merged_by_hand(name: str, tmp_path: Path) -> None:
    merged = make_model(name)
    weights = {
        f"model.layers.{layer}.{block}.{module}": place(merged, layer, block, module)
        for layer, blocks in ROWS[name].items()
        for block in blocks
        for module in MODULES.get(name, MLP)
    }
    assert_merged(name, merged, weights, [*MODULES.get(name, MLP)], tmp_path)


@pytest.mark.parametrize(
    ("name", "path", "own"),
    [
        ("granite-moe", "block_sparse_moe.router.layer", "block_sparse_moe.router"),
        pytest.param("mixtral", "block_sparse_moe.gate", "mlp.gate", marks=pytest.mark.exhaustive),
        pytest.param("qwen2-moe", "mlp.gate", "mlp.gate", marks=pytest.mark.exhaustive),
        pytest.param("hunyuan-moe", "mlp.gate.wg", "mlp.gate.wg", marks=pytest.mark.exhaustive),
        pytest.param("afmoe", "mlp.router.gate", "mlp.router.gate", marks=pytest.mark.exhaustive),
        ("afmoe", "self_attn.gate_proj", "self_attn.gate_proj"),
    ],
)
def test_routers_and_gates_by_their_names_as_linear_modules(
    name: str, path: str, own: str, tmp_path: Path
) -> None:
    """As transformers 4 has routers. own: the name that transformers has now."""
    merged = make_model(name)
    weights = dict(merged.named_parameters())
    changed: dict[str, torch.Tensor] = {
        f"model.layers.{layer}.{path}": weights[f"model.layers.{layer}.{own}.weight"]
        for layer in range(3)
        if f"model.layers.{layer}.{own}.weight" in weights
    }
    assert_merged(name, merged, changed, [path], tmp_path)


def test_modules_by_the_names_of_nemotrons_own_code(tmp_path: Path) -> None:
    merged, modules = make_model("nemotron-h"), MODULES["nemotron-h"]
    weights = {
        f"backbone.layers.0.mixer.{module}": place(merged, 0, "mixer", module) for module in modules
    }
    assert_merged("nemotron-h", merged, weights, [*modules], tmp_path)


def assert_merged(
    name: str,
    merged: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    targets: list[str],
    folder: Path,
) -> None:
    """Serves a random adapter of these modules as the same model with the adapter in its weights.

    merged: a copy of the row's model. weights: of it, by the names in the adapter's file.
    """
    base, generator = save_model(make_model(name), folder / "base"), torch.Generator()
    tensors: dict[str, torch.Tensor] = {}
    for path, weight in weights.items():
        a = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
        b = torch.randn(len(weight), RANK, generator=generator) * 0.2
        stem = f"base_model.model.{path}"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        with torch.no_grad():
            weight.add_(SCALE * b @ a)
    spec = base_spec(read_config(base), "0" * 64, ("base",))
    adapter = write(folder / "adapter", tensors, targets)
    driver = Driver(base)
    assert driver.load(0, *pack_folder(adapter, spec), 0).error is None
    pairs = [
        (model, Stream(driver, row, prompt(6 + 9 * row, row), slot=slot, sampling=GREEDY))
        for row, (model, slot) in enumerate(((make_model(name), -1), (merged, 0)))
    ]
    generate(driver, [stream for _, stream in pairs], 4, 5)
    for model, stream in pairs:
        assert_parity(model, None, stream)
    driver.close()
