"""What we make of an adapter is what PEFT loads: modules, ranks, scales, tensors."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.peft.lora_tensors import LoraTensors
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.floats import float_digest, read_floats
from tests.adapter_folders import ALL_PROJECTIONS, small_base
from tests.adapters.refusals import violation_codes

pytestmark = pytest.mark.filterwarnings("ignore")
LIMITS = AdapterLimits()
BASE = small_base(num_layers=3, names=("base",))


def model(tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=BASE.vocab_size,
        hidden_size=BASE.hidden_size,
        intermediate_size=48,
        num_hidden_layers=BASE.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    made.train(False)
    return made


def save(folder: Path, tied: bool = False, embeddings: bool = False, **options: Any) -> Path:
    """A PEFT adapter with random A and B, as PEFT saves it."""
    peft = get_peft_model(model(tied), LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    peft.save_pretrained(folder, save_embedding_layers=embeddings)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "base"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def loaded_by_peft(folder: Path, tied: bool = False) -> dict[tuple[str, int], Any]:
    """Module -> (scale, A, B), of modules whose product is not zero."""
    peft = PeftModel.from_pretrained(model(tied), str(folder))
    found = {}
    for path, module in peft.base_model.model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if module.lora_embedding_A:
            a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
        else:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        if bool((b @ a).any()):
            key = (path.rpartition(".")[2], _layer(path))
            found[key] = (module.scaling["default"], a.detach().numpy(), b.detach().numpy())
    return found


def _layer(path: str) -> int:
    return next((int(part) for part in path.split(".") if part.isdigit()), -1)


def loaded_by_us(folder: Path, base: BaseSpec = BASE) -> dict[tuple[str, int], Any]:
    adapter: LoraTensors = judge_folder(folder, base, LIMITS).tensors
    found = {}
    with open_weights(folder / "adapter_model.safetensors") as weights:
        for module in adapter.ordinary:
            a, b = (
                read_floats(weights.read(tensor), tensor.dtype).reshape(tensor.shape)
                for tensor in (module.a, module.b)
            )
            found[module.module, module.layer] = (module.scale, a, b)
    return found


def assert_same(folder: Path, tied: bool = False) -> None:
    theirs, ours = loaded_by_peft(folder, tied), loaded_by_us(folder)
    assert set(theirs) == set(ours)
    assert theirs
    for key, (scale, a, b) in theirs.items():
        assert ours[key][0] == scale, key
        np.testing.assert_array_equal(ours[key][1], a)
        np.testing.assert_array_equal(ours[key][2], b)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "rank 1": {"r": 1, "lora_alpha": 3, "target_modules": ["down_proj"]},
    "rank 24": {"r": 24, "lora_alpha": 7, "target_modules": ["gate_proj", "o_proj"]},
    "all linear": {"target_modules": "all-linear", "r": 3},
    "all seven": {"target_modules": list(ALL_PROJECTIONS)},
    "rslora": {"use_rslora": True, "r": 5, "target_modules": ["q_proj"]},
    "regex": {"target_modules": r".*layers\.[02]\..*\.(q|down)_proj"},
    "suffix": {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "layers pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [2],
        "layers_pattern": "layers",
    },
    "no layer of the embedding": {
        "target_modules": ["q_proj", "embed_tokens"],
        "layers_to_transform": [0],
        "lora_bias": True,
    },
    "no layer of the embedding, activated": {
        "target_modules": ["q_proj", "embed_tokens"],
        "layers_to_transform": [0],
        "alora_invocation_tokens": [3],
    },
    "full path beats layers": {
        "target_modules": ["q_proj", "model.layers.1.self_attn.k_proj"],
        "layers_to_transform": [0],
    },
    "excluded": {
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": ["layers.0.self_attn.q_proj"],
    },
    "excluded by regex": {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"v_proj": 3, r"layers\.1\.mlp\..*": 5},
        "alpha_pattern": {
            "layers.2.self_attn.q_proj": 1,
            "^model.layers.0.mlp.up_proj": 9,
            "proj": 2,
        },
    },
    "patterns in order": {
        "target_modules": ["q_proj"],
        "rank_pattern": {r"(layers\.0|layers\.2).*": 2, "q_proj": 4},
        "use_rslora": True,
    },
    "fan in fan out": {"target_modules": ["q_proj"], "fan_in_fan_out": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "r": 3},
    "head": {"target_modules": ["lm_head"], "r": 2},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "mica": {"target_modules": ["q_proj"], "init_lora_weights": "mica"},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case: str, tmp_path: Path) -> None:
    assert_same(save(tmp_path, **CASES[case]))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_tied_embeddings_are_adapted_apart(target: str, tmp_path: Path) -> None:
    assert_same(save(tmp_path, tied=True, target_modules=[target, "q_proj"]), tied=True)


def test_half_of_a_tied_adapter_is_refused(tmp_path: Path) -> None:
    """PEFT loads both tables' LoRA into one place."""
    tied = msgspec.structs.replace(BASE, is_tied=True)
    folder = save(tmp_path, tied=True, target_modules=["embed_tokens"], ensure_weight_tying=True)
    assert set(loaded_by_us(folder, tied)) == {("embed_tokens", -1), ("lm_head", -1)}
    rewrite(folder, lambda all: {k: v for k, v in all.items() if "lm_head" not in k})
    assert violation_codes(lambda: judge_folder(folder, tied, LIMITS)) == {"missing_tensor"}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save(tmp_path, target_modules=["q_proj", "v_proj"])


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_every_stored_dtype(dtype: torch.dtype, plain: Path) -> None:
    rewrite(plain, lambda all: {k: v.to(dtype) for k, v in all.items()})
    assert_same(plain)


def test_names_with_the_default_adapter_in_them(plain: Path) -> None:
    rewrite(plain, lambda all: {k.replace(".weight", ".default.weight"): v for k, v in all.items()})
    assert_same(plain)


def test_missing_layers_change_nothing(plain: Path) -> None:
    rewrite(plain, lambda all: {k: v for k, v in all.items() if ".layers.1." not in k})
    assert_same(plain)
    assert {layer for _, layer in loaded_by_us(plain)} == {0, 2}


def test_missing_layers_with_random_initial_values_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, target_modules=["q_proj"], init_lora_weights=False)
    assert_same(folder)
    rewrite(folder, lambda all: {k: v for k, v in all.items() if ".layers.1." not in k})
    assert violation_codes(lambda: judge_folder(folder, BASE, LIMITS)) == {"missing_tensor"}


@pytest.mark.parametrize("half", [True, False])
def test_embeddings_saved_beside_the_adapter(half: bool, tmp_path: Path) -> None:
    """PEFT saves the base's own table when it is targeted: fine if equal, else refused by name."""
    targets = ["embed_tokens", "lm_head"]
    folder = save(tmp_path, embeddings=True, target_modules=targets)
    assert any("base_layer" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert violation_codes(lambda: judge_folder(folder, BASE, LIMITS)) == {"base_weights_included"}
    own = model()
    tables = {"embed_tokens": own.model.embed_tokens.weight, "lm_head": own.lm_head.weight}
    digests = {}
    for name, table in tables.items():
        raw = np.frombuffer(table.detach().numpy().tobytes(), np.uint8)
        digests[name] = float_digest(raw, "F32")
    base = BaseSpec(
        **{f: getattr(BASE, f) for f in BASE.__struct_fields__} | {"embedding_digests": digests}
    )
    assert set(loaded_by_us(folder, base)) == {("embed_tokens", -1), ("lm_head", -1)}
    if half:
        rewrite(folder, lambda all: {k: v + 1 if "base_layer" in k else v for k, v in all.items()})
        codes = violation_codes(lambda: judge_folder(folder, base, LIMITS))
        assert codes == {"base_weights_changed"}


@pytest.mark.parametrize("targets", [["embed_tokens", "lm_head"], ["q_proj"]])
def test_embeddings_are_not_compared_without_a_base(targets: list[str], tmp_path: Path) -> None:
    folder = save(tmp_path, embeddings=True, target_modules=targets)
    copies = judge_folder(folder).tensors.base_copies
    assert {module for module, _ in copies} == {"embed_tokens", "lm_head"}

    cut = {f"base_model.model.lm_head.{name}" for name in ("weight", "base_layer.weight")}
    rewrite(folder, lambda all: {k: v[:-1] if k in cut else v for k, v in all.items()})
    assert violation_codes(lambda: judge_folder(folder)) == {"resized_embeddings"}


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_inits_that_change_the_base_are_refused(init: str, tmp_path: Path) -> None:
    folder = save(tmp_path, target_modules=["q_proj"], init_lora_weights=init)
    before = model().state_dict()["model.layers.0.self_attn.q_proj.weight"]
    loaded = PeftModel.from_pretrained(model(), str(folder))
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert not torch.equal(loaded.state_dict()[name], before), "PEFT leaves the base alone now"
    assert violation_codes(lambda: judge_folder(folder, BASE, LIMITS)) == {"unsupported_feature"}


def test_dora_has_a_length_for_each_output(tmp_path: Path) -> None:
    folder = save(tmp_path, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    found = judge_folder(folder, BASE, LIMITS).tensors
    assert found.config.use_dora
    assert {lora.module for lora in found.ordinary} == {"q_proj", "embed_tokens"}
    for lora in found.ordinary:
        assert lora.magnitude is not None
        assert lora.magnitude.shape == (BASE.hidden_size,)


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 5]}]
)
def test_tables_have_a_limit_of_their_own(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path, target_modules=["q_proj"], **options)
    judged = judge_folder(folder, BASE, LIMITS)
    (table,) = judged.tensors.tables
    assert table.module in judged.manifest.targets
    nbytes = table.tensor.nbytes
    judge_folder(folder, BASE, msgspec.structs.replace(LIMITS, max_table_bytes=nbytes))
    less = msgspec.structs.replace(LIMITS, max_table_bytes=nbytes - 1)
    assert violation_codes(lambda: judge_folder(folder, BASE, less)) == {"table_too_large"}
