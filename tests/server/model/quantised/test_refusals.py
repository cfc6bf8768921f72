"""What is malformed, contradictory or not read is refused by name, before or while it is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder, read_config
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.quantisation.read import read_quantisation
from loraplex.server.model.weights import load_weights
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import change_config, change_tensors, save_quantised
from tests.server.model.quantised.formats import FORMATS

GPTQ = {"quant_method": "gptq", "bits": 4}
AWQ = {"quant_method": "awq", "bits": 4}
FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def compressed(weights: dict[str, Any], **table: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    settings = {"format": "pack-quantized", "config_groups": {"group_0": group}}
    return {"quant_method": "compressed-tensors", **settings, **table}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({}, "('unnamed')"),
    ({"quant_method": ["awq"]}, "are not served"),
    ({"quant_method": "torchao"}, "('torchao')"),
    ({"quant_algo": "W4A8_NVFP4_FP8", "producer": {"name": "modelopt"}}, "('W4A8_NVFP4_FP8')"),
    ({**GPTQ, "bits": 3}, "gptq: bits must be 4 or 8, got 3"),
    ({**GPTQ, "bits": True}, "bits must be an integer"),
    ({**GPTQ, "group_size": 0}, "group_size must be positive or -1"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2"),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype must be int32"),
    ({**GPTQ, "desc_act": "yes"}, "desc_act must be true or false"),
    ({**GPTQ, "dynamic": {"+:(": {"bits": 8}}}, "dynamic: '+:(' is no regular expression"),
    ({**GPTQ, "dynamic": {"a": {"bits": 2}}}, "bits must be 4 or 8, got 2"),
    ({**GPTQ, "dynamic": {"a": 8}}, "dynamic: 'a' must have a table"),
    ({**GPTQ, "dynamic": ["a"]}, "dynamic must be a table"),
    ({**AWQ, "bits": 8}, "awq: bits must be 4, got 8"),
    ({**AWQ, "version": "gemv"}, "version must be gemm"),
    ({**AWQ, "zero_point": False}, "zero_point must be true"),
    ({**AWQ, "group_size": -1}, "group_size must be positive"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be e4m3"),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit or load_in_8bit must be true"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
        "bnb_4bit_quant_type must be nf4 or fp4",
    ),
    (compressed({**INT4, "num_bits": 3}), "num_bits must be 4 or 8, got 3"),
    (compressed({**INT4, "type": "float"}), "type must be int"),
    (compressed({**INT4, "strategy": "tensor_group"}), "strategy must be"),
    (compressed(INT4, format="nvfp4-pack-quantized"), "type must be float"),
    (compressed(FP4, format="mxfp4-pack-quantized"), "group_size must be 32 in mxfp4"),
    (compressed({**FP4, "symmetric": False}, format="nvfp4-pack-quantized"), "no zero points"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo must be fp8 or nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size must be"),
    (compressed(INT4, format="mixed-precision"), "group_0: format is missing"),
    (compressed(INT4, sparsity_config={"format": "sparse-24"}), "sparse-24"),
    (compressed(INT4, transform_config={"config_groups": {"R1": {}}}), "rotations"),
    (compressed(INT4, quantization_status="frozen"), "quantization_status must be compressed"),
    (compressed(INT4, config_groups={}), "config_groups must name a group"),
    (compressed(INT4, config_groups={"W4A16": ["Linear"]}), "W4A16 must be a table"),
    (compressed(INT4, config_groups={"g": {"targets": ["re:("], "weights": INT4}}), "re:"),
    (
        compressed(INT4, config_groups={"g": {"targets": "Linear", "weights": INT4}}),
        "list of names",
    ),
    (compressed(INT4, config_groups={"g": {"targets": ["Linear"]}}), "weights must be a table"),
]


@pytest.mark.parametrize(("table", "words"), CONFIGS, ids=[words for _, words in CONFIGS])
def test_of_the_configuration(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        read_quantisation(table)
    assert words.replace("re:", "") in str(caught.value)


def test_no_table_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match="quantization_config must be a table, got 'awq'"):
        read_model({"model_type": "llama", "quantization_config": "awq"})


def test_each_group_has_its_modules() -> None:
    groups = {
        "every": {"targets": ["Linear"], "weights": INT4},
        "pattern": {"targets": ["re:.*mlp.*"], "weights": {**INT4, "group_size": 64}},
        "name": {"targets": ["model.layers.1.mlp.up_proj"], "weights": {**INT4, "num_bits": 8}},
    }
    found = read_quantisation(compressed(INT4, config_groups=groups))
    layers = {
        "model.layers.1.self_attn.q_proj": (4, 32),
        "model.layers.1.mlp.up_proj": (8, 32),
        "model.layers.11.mlp.up_proj": (4, 64),
        "model.layers.1.mlp.up_projection": (4, 64),
    }
    for path, (bits, group) in layers.items():
        form: Any = found.form(path)
        assert (form.bits, form.group) == (bits, group), path


def test_the_first_pattern_of_gptq_counts() -> None:
    dynamic = {
        r"-:.*\.1\..*": {},
        r"+:.*\.[12]\..*up_proj": {"bits": 8, "group_size": 64},
        r".*up_proj": {"group_size": 32},
    }
    found = read_quantisation({**GPTQ, "dynamic": dynamic})
    assert found.form("model.layers.1.mlp.up_proj") is None
    sizes = {"2.mlp.up_proj": (8, 64), "3.mlp.up_proj": (4, 32), "3.mlp.down_proj": (4, 128)}
    for path, (bits, group) in sizes.items():
        form: Any = found.form(f"model.layers.{path}")
        assert (form.bits, form.group) == (bits, group), path


# A format -> what is changed of a module's tensors, and the sentence's words.
SOME = torch.zeros(3, 5)
TENSORS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"qzeros": None}, "1 missing: model.layers.0."),
    ("gptq", {"scales": None}, "scales"),
    ("gptq", {"qweight": SOME.int()}, "qweight (expected I32 [14, 64], got I32 [3, 5])"),
    ("gptq", {"qweight": torch.zeros(14, 64)}, "got F32"),
    ("awq", {"qzeros": SOME}, "qzeros (expected I32 "),
    ("fp8-block", {"weight_scale_inv": None}, "weight_scale_inv"),
    ("fp8-block", {"weight_scale_inv": SOME}, "weight_scale_inv (expected "),
    ("ct-int4-group", {"weight_packed": SOME.int()}, "weight_packed (expected I32 "),
    ("ct-int4-zeros", {"weight_zero_point": None}, "weight_zero_point"),
    ("ct-int8-channel", {"weight_scale": SOME}, "weight_scale (expected "),
    ("nf4-nested", {"weight.quant_map": SOME}, "weight.quant_map (expected "),
    ("int8-rowwise", {"SCB": SOME}, "SCB (expected "),
]


@pytest.mark.parametrize(("form", "changes", "words"), TENSORS, ids=lambda value: str(value)[:24])
def test_of_the_tensors(form: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS[form])
    change_tensors(tmp_path, changes)
    with pytest.raises(CheckpointError) as caught:
        check_folder(tmp_path)
    assert words in str(caught.value)


STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> torch.Tensor:
    """bitsandbytes' text of a matrix `[64, 112]`."""
    text = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 112], "dtype": "float32"}
    text |= {"nested_blocksize": 256, "nested_offset": 0.1, "nested_dtype": "float32", **changes}
    return torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)


LOADED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"g_idx": torch.zeros(112, dtype=torch.int32)}, "g_idx must have 16 inputs"),
    ("gptq", {"g_idx": torch.full((112,), 99, dtype=torch.int32)}, "g_idx must have"),
    ("ct-int4-group", {"weight_shape": torch.tensor([1, 2])}, "weight_shape is [1, 2]"),
    ("nf4-nested", {"weight": torch.zeros(9, 1, dtype=torch.uint8)}, "3584 bytes"),
    ("nf4-nested", {"weight.nested_absmax": torch.zeros(9)}, "nested_absmax must be of"),
    ("nf4-nested", {"weight.nested_absmax": None}, "weight.nested_absmax is missing"),
    ("nf4", {"weight.absmax": torch.zeros(9)}, "weight.absmax must be of"),
    ("nf4", {STATE: torch.full((4000,), ord("["), dtype=torch.uint8)}, "cannot be read"),
    ("int8-rowwise", {"weight_format": torch.tensor(2, dtype=torch.uint8)}, "weight_format"),
]
STATES: list[tuple[dict[str, Any], str]] = [
    ({"blocksize": "64"}, "an even blocksize"),
    ({"blocksize": 0}, "an even blocksize"),
    ({"nested_blocksize": None}, "an even nested_blocksize"),
    ({"quant_type": "fp4"}, "expected nf4 of [64, 112]"),
    ({"shape": [112, 64]}, "expected nf4 of [64, 112]"),
    ({"shape": 7}, "cannot be read"),
    ({"blocksize": 10**30}, "an even blocksize"),
    ({"nested_offset": "x"}, "a number nested_offset, got 'x'"),
    ({"nested_offset": None}, "a number nested_offset, got None"),
    ({"nested_offset": 10**400}, "a number nested_offset, got 1000"),
    ({"nested_offset": float("nan")}, "a number nested_offset, got nan"),
]


def assert_refused_at_load(folder: Path, words: str) -> None:
    check_folder(folder)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj: ") as caught:
        load_weights(folder, read_config(folder), torch.float32, torch.device("cpu"))
    assert words in str(caught.value)


@pytest.mark.parametrize(("form", "changes", "words"), LOADED, ids=lambda value: str(value)[:24])
def test_of_what_they_hold(form: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS[form])
    change_tensors(tmp_path, changes)
    assert_refused_at_load(tmp_path, words)


@pytest.mark.parametrize(("changes", "words"), STATES, ids=str)
def test_of_the_state(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS["nf4-nested"])
    change_tensors(tmp_path, {STATE: state(**changes)})
    assert_refused_at_load(tmp_path, words)


def test_quantised_weights_without_a_word_in_the_configuration(tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS["awq"])
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"quantised \(.*qweight\), and config.json does not"):
        check_folder(tmp_path)
