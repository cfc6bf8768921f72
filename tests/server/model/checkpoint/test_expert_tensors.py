"""Experts are read from every form in which a checkpoint may hold them, to the same answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder, read_config
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import make_model, save_model

WEIGHTS = "model.safetensors"


def assert_served(folder: Path, model: PreTrainedModel) -> None:
    driver = Driver(folder, activations="bf16")
    streams = [Stream(driver, row, prompt(9 + row, row), sampling=GREEDY) for row in range(2)]
    generate(driver, streams, 5, 4)
    for stream in streams:
        assert_parity(model, None, stream)
    driver.close()


# Of the last four the router, or what corrects its scores, has another name in published files.
@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen3-moe-dense-layer", "ernie-moe", "exaone-moe", "minimax-m2", "phimoe"],
)
def test_one_tensor_for_all_experts(name: str, tmp_path: Path) -> None:
    """As transformers names them itself; Mixtral's router then has another name, too."""
    model = make_model(name)
    folder = save_model(model, tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / WEIGHTS)
    assert_served(folder, model)


def mxfp4_model(folder: Path, *, intermediate_size: int = 96, **changes: Any) -> PreTrainedModel:
    """A gpt-oss checkpoint whose experts are MXFP4, and the model of its values. changes: of
    config.json."""
    model = make_model("gpt-oss", intermediate_size=intermediate_size)
    decoder: Any = model.get_submodule("model")
    generator = torch.Generator().manual_seed(7)
    packed: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(decoder.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)  # [experts, in, out]
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            path = f"model.layers.{index}.mlp.experts.{name}"
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
            packed |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            weight.data.copy_(values)
    save_model(model, folder)
    tensors = load_file(folder / WEIGHTS)
    dense = {name: t for name, t in tensors.items() if f"{name}_blocks" not in packed}
    save_file({**dense, **packed}, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config |= {"quantization_config": quantised, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_mxfp4_is_served_as_transformers_dequantises_it(tmp_path: Path) -> None:
    model = mxfp4_model(tmp_path)
    assert_served(tmp_path, model)


def test_blocks_without_scales_are_no_checkpoint(tmp_path: Path) -> None:
    mxfp4_model(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\..*down_proj_scales"):
        check_folder(tmp_path)


def test_blocks_are_bytes(tmp_path: Path) -> None:
    mxfp4_model(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"1 wrong: .*down_proj_blocks .*got F32"):
        check_folder(tmp_path)


def test_another_method_is_refused(tmp_path: Path) -> None:
    mxfp4_model(tmp_path, quantization_config={"quant_method": "mxfp6"})
    with pytest.raises(CheckpointError, match="quantised weights .*mxfp6.* are not served"):
        read_config(tmp_path)
