"""Quantised experts, heads, text parts and biases: with the values that their tensors stand for."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.model.card import read_base_spec
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder, read_config
from loraplex.server.model.linear.linear import ExpertsLinear, MoeWeights
from loraplex.server.model.ops.memory import weights_bytes
from loraplex.server.model.weights import LayerWeights, load_weights
from tests.server.model.checkpoint.test_expert_tensors import assert_served, mxfp4_model
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.quantised.checkpoints import change_config, save_quantised
from tests.server.model.quantised.formats import FORMATS

WEIGHTS = "model.safetensors"


def quantise_stored(
    model: PreTrainedModel, folder: Path, form: str, pattern: str
) -> PreTrainedModel:
    """Save the model with those matrices packed whose stored names match; returns one of their
    values."""
    save_model(model, folder)
    plain, packed = load_file(folder / WEIGHTS), {}
    values = dict(plain)
    for name, tensor in plain.items():
        if re.fullmatch(pattern, name) is None:
            packed[name] = tensor
            continue
        found, weight = FORMATS[form].pack(tensor)
        path = name.removesuffix(".weight")
        if f"{path}.bias" in plain:
            found.pop("bias", None)
        packed |= {f"{path}.{suffix}": t.contiguous().clone() for suffix, t in found.items()}
        values[name] = weight
    assert len(packed) > len(plain)
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    found_model: PreTrainedModel = type(model).from_pretrained(folder, config=model.config)
    save_file(packed, folder / WEIGHTS, metadata={"format": "pt"})
    change_config(folder, quantization_config=FORMATS[form].config)
    return found_model


@pytest.mark.parametrize(
    "form", ["fp8-block", "awq", "gptq-order", "ct-int4-channel", "nf4-nested"]
)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts(name: str, form: str, tmp_path: Path) -> None:
    model = quantise_stored(make_model(name), tmp_path, form, r".*experts\.[0-9]+\..*\.weight")
    assert_served(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "choosers", "form"),
    [
        ("qwen2-moe", r"mlp\.(gate|shared_expert_gate)", "nf4-nested"),
        ("gemma4-moe", r"router\.proj", "int8-rowwise"),
    ],
)
def test_what_chooses_experts(name: str, choosers: str, form: str, tmp_path: Path) -> None:
    model = quantise_stored(make_model(name), tmp_path, form, rf".*\.{choosers}\.weight")
    assert_served(tmp_path, model)


@pytest.mark.parametrize("form", ["awq", "fp8-tensor", "nf4-nested"])
def test_experts_stay_quantised(form: str, tmp_path: Path) -> None:
    model = make_model("qwen3-moe", moe_intermediate_size=64, hidden_size=64)
    quantise_stored(model, tmp_path, form, r".*experts\.[0-9]+\..*\.weight")
    assert_experts_stay(tmp_path)


def assert_experts_stay(folder: Path) -> None:
    """Packed in memory, with the same values; their bytes are known before."""
    model = read_config(folder)
    loaded = [
        load_weights(folder, model, torch.float32, torch.device("cpu"), packed=packed)
        for packed in (False, True)
    ]
    for plain, packed in zip(*(each.layers for each in loaded), strict=True):
        for a, b in zip(_experts(plain), _experts(packed), strict=True):
            assert isinstance(b.weight, PackedMatrix)
            assert b.out_features == a.out_features
            assert b.nbytes < 0.4 * a.nbytes
            for expert in (0, 3):
                x = torch.randn(2, a.in_features)
                found = b.run(expert, x)
                torch.testing.assert_close(found, a.run(expert, x), atol=1e-5, rtol=1e-5)
    dense, estimate = (weights_bytes(model, "float32", packed=packed) for packed in (False, True))
    saved = sum(
        a.nbytes - b.nbytes
        for plain, packed in zip(*(each.layers for each in loaded), strict=True)
        for a, b in zip(_experts(plain), _experts(packed), strict=True)
    )
    kept = sum(
        layer.attention.qkv.nbytes + layer.attention.o.nbytes
        for each in loaded[1:]
        for layer in each.layers
    )
    # What config.json does not say is in floating point counts as quantised.
    assert dense - estimate == pytest.approx(saved, rel=0.1, abs=kept)


def _experts(layer: LayerWeights) -> tuple[ExpertsLinear, ExpertsLinear]:
    assert isinstance(layer.branches[1], MoeWeights)
    return layer.branches[1].gate_up, layer.branches[1].down


def test_mxfp4_stays_so(tmp_path: Path) -> None:
    mxfp4_model(tmp_path, intermediate_size=128)
    assert_experts_stay(tmp_path)


@pytest.mark.parametrize("form", ["fp8-tensor", "gptq-8", "ct-int4-channel", "nf4"])
def test_heads(form: str, tmp_path: Path) -> None:
    base = make_model("llama3", vocab_size=96)
    model = quantise_stored(base, tmp_path, form, r"lm_head\.weight")
    weights = load_weights(tmp_path, read_config(tmp_path), torch.float32, torch.device("cpu"))
    assert torch.equal(weights.lm_head.dequantised(), model.lm_head.weight)
    assert set(read_base_spec(tmp_path, ()).embedding_digests) == {"embed_tokens"}


def test_embeddings_stay_in_floating_point(tmp_path: Path) -> None:
    pattern = r"model\.embed_tokens\.weight"
    quantise_stored(make_model("llama3"), tmp_path, "fp8-tensor", pattern)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight \(expected \[97, 64\], got F8"
    ):
        check_folder(tmp_path)


def test_biases_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Older writers of GPTQ store one for every matrix. Zeros are none; others are added."""
    save_quantised(make_model("llama3"), tmp_path, FORMATS["gptq"])
    tensors = load_file(tmp_path / WEIGHTS)
    bias = torch.arange(32, dtype=torch.float16)
    tensors["model.layers.1.self_attn.v_proj.bias"] = bias
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    weights = load_weights(tmp_path, read_config(tmp_path), torch.float32, torch.device("cpu"))
    assert weights.layers[0].attention.qkv.bias is None
    found = weights.layers[1].attention.qkv.bias
    assert found is not None
    assert torch.equal(found, torch.cat((torch.zeros(96), bias.float())))


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3-images"])
def test_text_parts(name: str, tmp_path: Path) -> None:
    pattern = r".*layers\.[0-9]+\.(self_attn|mlp)\.[a-z_]+proj\.weight"
    model = quantise_stored(make_model(name), tmp_path, "fp8-block", pattern)
    assert_served(tmp_path, model)


def test_scales_of_keys_and_values_may_be_there(tmp_path: Path) -> None:
    model = make_model("llama3")
    save_quantised(model, tmp_path, FORMATS["ct-fp8-channel"])
    tensors = load_file(tmp_path / WEIGHTS)
    for name in ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale"):
        tensors[f"model.layers.0.{name}"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert_served(tmp_path, model)
