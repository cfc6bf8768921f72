"""LoRA on experts: each expert's delta in a packed slab is the one that PEFT adds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.torch import load_file, save_file
from torch import nn

from loraplex.adapters.base import BaseSpec, base_modules
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.peft.validate import WEIGHTS_FILE
from loraplex.adapters.slab.layout import PlacedMatrix, a_matrix, b_matrices, make_layout
from tests.adapters.expert_bases import EXPERTS, HIDDEN, INNER, MODELS
from tests.slab_files import read_layout, read_payload, write_slab

pytestmark = pytest.mark.filterwarnings("ignore")
Delta = npt.NDArray[np.float32]
# (layer, short name) -> `[out, in]`; of experts `[experts, out, in]`.
Deltas = dict[tuple[int, str], Delta]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXTENT = 4096


def packed(folder: Path, base: BaseSpec) -> tuple[SlabLayout, bytes]:
    judged = judge_folder(folder, base)
    layout = make_layout(judged.tensors, base, judged.manifest.digest, "float32", EXTENT)
    target = folder.parent / f"{folder.name}.slab"
    write_slab(folder / WEIGHTS_FILE, judged.tensors, base, layout, target)
    return read_layout(target), read_payload(target)


def packed_deltas(folder: Path, base: BaseSpec) -> Deltas:
    """scale B A of every module, from the slab alone."""
    layout, payload = packed(folder, base)

    def numbers(placed: PlacedMatrix) -> Delta:
        raw = payload[placed.offset : placed.offset + placed.nbytes]
        return np.frombuffer(raw, "<f4").reshape(placed.shape)

    found: Deltas = {}
    for site in layout.sites:
        a, begin = numbers(a_matrix(site, base, 4)), 0
        for index, b in enumerate(b_matrices(site, base, 4)):
            own = a[..., begin : begin + site.ranks[index], :]
            begin += 0 if site.shares_a else site.ranks[index]
            if b is not None:
                name = base.site_names(site.layer, site.role)[index]
                found[site.layer, name] = site.scales[index] * (numbers(b) @ own)
    return found


def assert_same(ours: Deltas, theirs: Deltas) -> None:
    assert set(ours) == set(theirs)
    assert theirs
    for place, delta in theirs.items():
        np.testing.assert_allclose(ours[place], delta, rtol=0, atol=1e-6, err_msg=str(place))


def fill(model: nn.Module) -> None:
    """Random A and B, small enough that products are exact to 1e-6 in float32."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)


def save(peft: Any, folder: Path, **changes: Any) -> Path:
    fill(peft)
    peft.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": "base"} | changes
    path.write_text(json.dumps(config))
    return folder


def peft_deltas(peft: Any, family: str) -> Deltas:
    """PEFT's own delta of every wrapped module and parameter, by module of the base."""
    found: Deltas = {}
    for path, module in peft.base_model.model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer = int(path.split(".")[2])
        delta = module.get_delta_weight("default").detach().numpy()
        if not isinstance(module, ParamWrapper) or module.parameter_name == "weight":
            found[layer, path.rpartition(".")[2]] = delta
            continue
        found |= parts_of(family, layer, module.parameter_name, delta)
    return found


def parts_of(family: str, layer: int, parameter: str, delta: Delta) -> Deltas:
    """As the model's code reads its weights: chunks, or every other column of the transpose."""
    gate, up, down = (f"experts.{name}" for name in MODELS[family].names)
    if family == "gpt_oss":
        delta = delta.transpose(0, 2, 1)
    if parameter == "down_proj":
        return {(layer, down): delta}
    if family == "gpt_oss":
        return {(layer, gate): delta[:, ::2], (layer, up): delta[:, 1::2]}
    return {(layer, gate): delta[:, :INNER], (layer, up): delta[:, INNER:]}


CASES: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": BOTH, "r": 3, "lora_alpha": 5},
    "rank 1": {"target_parameters": BOTH, "r": 1},
    "gate and up": {"target_parameters": ["gate_up_proj"], "r": 2},
    "down": {"target_parameters": ["experts.down_proj"], "r": 2},
    "with attention": {"target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH, "r": 4},
    "rslora": {"target_parameters": BOTH, "r": 5, "use_rslora": True},
    "one layer": {"target_parameters": ["0.mlp.experts.gate_up_proj"], "r": 2},
    "different layers": {
        "target_parameters": ["0.mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "r": 2,
    },
    "patterns": {
        "target_parameters": BOTH,
        "r": 4,
        "rank_pattern": {"experts.down_proj": 2, r"layers\.0\..*gate_up_proj": 3},
        "alpha_pattern": {r".*\.gate_up_proj": 7},
    },
    "weight of a linear": {"target_parameters": ["q_proj.weight"], "r": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", MODELS)
def test_tensors_of_all_experts(family: str, case: str, tmp_path: Path) -> None:
    options = {"target_modules": [], "init_lora_weights": True} | CASES[case]
    peft = get_peft_model(MODELS[family].make(), LoraConfig(**options))
    folder = save(peft, tmp_path / "a")
    assert_same(packed_deltas(folder, MODELS[family].base), peft_deltas(peft, family))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_what_peft_makes_of_names_of_the_experts_modules(family: str, tmp_path: Path) -> None:
    """PEFT 0.21 turns them into tensors of all experts, with twice the rank."""
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", *MODELS[family].names])
    peft = get_peft_model(MODELS[family].make(), config)
    folder = save(peft, tmp_path / "a")
    assert "rank_pattern" in json.loads((folder / "adapter_config.json").read_text())
    assert_same(packed_deltas(folder, MODELS[family].base), peft_deltas(peft, family))


class Tree(nn.Module):
    """The modules of transformers 4, which had one for each expert."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.config = {"model_type": "custom"}
        for module in base_modules(MODELS[family].base):
            shape = module.shape
            if module.layer < 0:
                continue
            count = shape.experts if shape.is_of_experts else 1
            for expert in range(count):
                path = module.path.replace("{}", str(expert))
                self._put(path, nn.Linear(shape.in_features, shape.out_features, bias=False))

    def _put(self, path: str, linear: nn.Linear) -> None:
        *parents, last = path.split(".")
        at: nn.Module = self
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, nn.Module())
            at = getattr(at, parent)
        at.add_module(last, linear)


def tree_deltas(peft: Any, family: str) -> Deltas:
    """Experts without LoRA have a delta of zero, if any expert has one."""
    found: Deltas = {}
    base = MODELS[family].base
    for path, module in peft.base_model.model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        parts, delta = path.split("."), module.get_delta_weight("default").detach().numpy()
        layer, name = int(parts[2]), parts[-1]
        if not parts[-2].isdigit():
            found[layer, name] = delta
            continue
        shape = base.modules_of(layer)[f"experts.{name}"]
        sizes = (shape.experts, shape.out_features, shape.in_features)
        found.setdefault((layer, f"experts.{name}"), np.zeros(sizes, np.float32))
        found[layer, f"experts.{name}"][int(parts[-2])] = delta
    return found


TREES: dict[str, dict[str, Any]] = {
    "all": {"targets": ("q_proj", 0, 1, 2), "r": 3, "lora_alpha": 5},
    "down": {"targets": (2,), "r": 2},
    "up": {"targets": (1,), "r": 2},
    "rslora": {"targets": (0, 1, 2), "r": 3, "use_rslora": True},
    "one expert": {"pattern": r".*experts\.2\..*", "r": 2},
    "ranks by expert": {
        "targets": (0, 1, 2),
        "r": 4,
        "lora_alpha": 6,
        "rank_pattern": {r".*experts\.1\..*": 2, r".*experts\.3\..*": 1},
        "alpha_pattern": {r".*experts\.2\..*": 3},
    },
    "some experts of one layer": {"pattern": r".*layers\.0\..*experts\.[13]\..*", "r": 2},
}


@pytest.mark.parametrize("case", TREES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_modules_of_each_expert(family: str, case: str, tmp_path: Path) -> None:
    options = dict(TREES[case])
    names = MODELS[family].names
    targets = options.pop("targets", ())
    pattern = options.pop("pattern", None)
    wanted = pattern or [name if isinstance(name, str) else names[name] for name in targets]
    peft = get_peft_model(Tree(family), LoraConfig(target_modules=wanted, **options))
    folder = save(peft, tmp_path / "a")
    assert_same(packed_deltas(folder, MODELS[family].base), tree_deltas(peft, family))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_modules_of_each_expert_are_what_peft_loads_into_transformers_5(
    family: str, tmp_path: Path
) -> None:
    names = list(MODELS[family].names)
    tree = get_peft_model(Tree(family), LoraConfig(r=2, lora_alpha=3, target_modules=names))
    folder = save(tree, tmp_path / "a")
    if family == "qwen3_moe":  # PEFT leaves the dense layers' tensors out
        weights = load_file(folder / WEIGHTS_FILE)
        kept = {name: each for name, each in weights.items() if ".layers.1." not in name}
        save_file(kept, folder / WEIGHTS_FILE)
    loaded = PeftModel.from_pretrained(MODELS[family].make(), str(folder))
    assert_same(packed_deltas(folder, MODELS[family].base), peft_deltas(loaded, family))


def without(folder: Path, part: str) -> None:
    weights = load_file(folder / WEIGHTS_FILE)
    kept = {name: each for name, each in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / WEIGHTS_FILE)


def test_experts_without_tensors_stay_as_they_are_and_are_counted(tmp_path: Path) -> None:
    base = MODELS["mixtral"].base
    peft = get_peft_model(Tree("mixtral"), LoraConfig(r=2, target_modules=["w1", "w2", "w3"]))
    folder = save(peft, tmp_path / "a")
    without(folder, ".layers.0.block_sparse_moe.experts.3.")
    found = packed_deltas(folder, base)
    expected = tree_deltas(peft, "mixtral")
    for place, delta in expected.items():
        if place[0] == 0:
            delta[3] = 0
    assert_same(found, expected)
    coverage = judge_folder(folder, base).manifest.coverage
    assert coverage is not None
    assert (coverage.modules, coverage.targeted) == (21, 24)
    assert coverage.lacking == ("experts.w1", "experts.w2", "experts.w3")


def test_a_shared_a_is_packed_once(tmp_path: Path) -> None:
    """Of a tensor that holds gate and up; what is no place of a number is zero."""
    base = MODELS["gpt_oss"].base
    options = {"target_modules": [], "target_parameters": ["gate_up_proj"], "r": 3}
    folder = save(get_peft_model(MODELS["gpt_oss"].make(), LoraConfig(**options)), tmp_path / "a")
    layout, _ = packed(folder, base)
    site = layout.sites[0]
    assert (site.role, site.ranks, site.shares_a, site.a_rank) == (
        "experts_gate_up",
        (3, 3),
        True,
        3,
    )
    assert a_matrix(site, base, 4).shape == (EXPERTS, 3, HIDDEN)
    manifest = judge_folder(folder, base).manifest
    assert manifest.targets == ("experts.gate_proj", "experts.up_proj")
    assert manifest.nbytes == 2 * 4 * 3 * EXPERTS * (HIDDEN + 2 * INNER)
