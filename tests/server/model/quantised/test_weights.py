"""A quantised matrix is read as the form's own tool reads it, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.server.model.checkpoint import unpack
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, read_config
from loraplex.server.model.weights import MlpWeights, ModelWeights, load_weights
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import matrices, save_quantised
from tests.server.model.quantised.formats import FORMATS, OF_WIDE_GROUPS

# Shapes that no block or group divides, where the form takes them.
SHAPES: dict[str, Any] = {"hidden_size": 80, "head_dim": 24, "intermediate_size": 176}
ODD: dict[str, Any] = {"hidden_size": 76, "head_dim": 18, "intermediate_size": 117}
OF_ODD = (
    "fp8-block",
    "fp8-tensor",
    "fp8-channel",
    "ct-fp8-channel",
    "ct-fp8-block",
    "ct-int8-zeros",
    "ct-int4-channel",
    "nf4-nested",
    "fp4",
    "int8-rowwise",
)
# bitsandbytes multiplies with the scale and 1 / 127 in turn, and rounds after each.
ROUNDED = {"int8-rowwise": 2**-22}


def load(folder: Path) -> ModelWeights:
    return load_weights(folder, read_config(folder), torch.float32, torch.device("cpu"))


def assert_loaded(weights: ModelWeights, oracle: Any, ulp: float = 0.0) -> None:
    """ulp: by which part of itself a number may differ."""
    found = {name: module.weight for name, module in matrices(oracle)}
    for number, layer in enumerate(weights.layers):
        path = f"model.layers.{number}"
        mlp = layer.branches[1]
        assert isinstance(mlp, MlpWeights)
        expected = {
            layer.attention.qkv: [f"self_attn.{part}_proj" for part in "qkv"],
            layer.attention.o: ["self_attn.o_proj"],
            mlp.gate_up: ["mlp.gate_proj", "mlp.up_proj"],
            mlp.down: ["mlp.down_proj"],
        }
        for linear, parts in expected.items():
            whole = torch.cat([found[f"{path}.{part}"] for part in parts])
            torch.testing.assert_close(linear.weight, whole, rtol=ulp, atol=0.0)


@pytest.mark.parametrize("name", FORMATS)
def test_as_the_tool_reads_it(name: str, tmp_path: Path) -> None:
    model = make_model("llama3", **SHAPES)
    save_quantised(model, tmp_path, FORMATS[name])
    assert_loaded(load(tmp_path), model, ROUNDED.get(name, 0.0))


def test_mxfp4_as_the_tool_writes_it(tmp_path: Path) -> None:
    model = make_model("llama3", intermediate_size=96)
    save_quantised(model, tmp_path, OF_WIDE_GROUPS)
    assert_loaded(load(tmp_path), model)


@pytest.mark.parametrize("name", OF_ODD)
def test_of_odd_shapes(name: str, tmp_path: Path) -> None:
    model = make_model("llama3", **ODD)
    save_quantised(model, tmp_path, FORMATS[name])
    assert_loaded(load(tmp_path), model, ROUNDED.get(name, 0.0))


def test_zero_points_of_outputs_that_fill_one_word() -> None:
    """As those of Mamba's time steps, which are a part of a matrix."""
    words = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    assert unpack._bytes(words.T).tolist() == [[each, 0, 0, 0] for each in (1, 2, 3)]


def test_outputs_that_fill_no_words_of_awq(tmp_path: Path) -> None:
    model = make_model("llama3", num_key_value_heads=1, head_dim=18)
    save_quantised(model, tmp_path, FORMATS["awq"])
    with pytest.raises(CheckpointError, match=r"k_proj.qweight \(expected I32 \[64, 3\]"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["awq", "ct-fp8-channel", "nf4"])
def test_skipped_modules_and_shards(name: str, tmp_path: Path) -> None:
    model = make_model("llama3", **SHAPES)
    skip = ("down_proj", "k_proj")
    save_quantised(model, tmp_path, FORMATS[name], skip, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_loaded(load(tmp_path), model)


def test_a_large_matrix_is_dequantised_in_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from loraplex.server.model.linear import packed

    monkeypatch.setattr(packed, "_CHUNK", 1000)
    for name in ("fp8-block", "gptq-order", "ct-int8-zeros", "nf4-nested"):
        model = make_model("llama3", **SHAPES)
        folder = tmp_path / name
        save_quantised(model, folder, FORMATS[name])
        assert_loaded(load(folder), model)
