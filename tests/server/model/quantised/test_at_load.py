"""Weights that are quantised when they are loaded: as the formats' own tools would."""

import re
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex.server.config import AtLoad, ConfigError
from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.linear.packed import PackedWeight
from loraplex.server.model.linear.quantise import NF4, quantise
from loraplex.server.model.spec.served_as import form_at_load, served_as
from loraplex.server.model.weights import load_weights
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.driver import Driver
from tests.server.model.families.kin import KIN
from tests.server.model.families.parity import assert_parity_with
from tests.server.model.families.variants import VARIANTS, rows
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import FORMATS

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
CPU = torch.device("cpu")


def quantised(weight: torch.Tensor, scheme: AtLoad) -> PackedWeight | None:
    return quantise(weight, form_at_load(scheme))


def values(weight: torch.Tensor, scheme: AtLoad) -> torch.Tensor:
    found = quantised(weight, scheme)
    return weight.clone() if found is None else found.dequantised(torch.empty(weight.shape))


def test_nf4_as_bitsandbytes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2050, 192)
    weight[7, 64:128] = 0
    quantised, state = bnb.quantize_4bit(weight.flatten(), blocksize=64, quant_type="nf4")
    expected = bnb.dequantize_4bit(quantised, state).view(weight.shape)
    assert torch.equal(state.code, torch.tensor(NF4))
    found = values(weight, "nf4")
    # A number that is as near to two codes may be either's, by rounding.
    same = found == expected
    assert same.float().mean() > 0.9999
    torch.testing.assert_close((found - weight).abs(), (expected - weight).abs(), atol=1e-5, rtol=0)


def test_fp8_is_the_nearest_of_its_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2050, 96) * torch.rand(2050, 1) * 10
    weight[5] = 0
    found = quantised(weight, "fp8")
    assert found is not None
    assert found.bits == 0
    assert found.scales.shape == (2050, 1)
    back = found.dequantised(torch.empty(weight.shape))
    assert torch.equal(back[5], weight[5])
    # Three bits of mantissa, and the least number of E4M3.
    error, least = (back - weight).abs(), weight.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert (error <= torch.maximum(weight.abs() * 2**-4, least)).all()
    assert torch.equal(back.abs().amax(1)[:5], weight.abs().amax(1)[:5])


def round_layers(model: PreTrainedModel, scheme: AtLoad) -> None:
    """The matrices of layers become what they are after a start; `Conv1D` has them turned."""
    of_layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and re.search(r"\.(layers|h|blocks)\.", name)
    ]
    assert of_layers, "a name of layers that is not known here"
    with torch.no_grad():
        for module in of_layers:
            weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T
            weight.copy_(values(weight.contiguous(), scheme))


ADAPTED_KIN = [name for name, row in KIN.items() if row.is_adapted and not row.others()]


def test_shapes_that_a_scheme_does_not_take_stay_as_they_are() -> None:
    assert quantised(torch.randn(4, 96), "nf4") is None
    found = quantised(torch.randn(4, 128), "nf4")
    assert found is not None
    assert found.bits == 4


@pytest.mark.parametrize("scheme", ["fp8", "nf4"])
@pytest.mark.parametrize("name", rows(["llama3", "qwen2", "gemma3", "gemma4-inputs", *ADAPTED_KIN]))
def test_served_with_adapters(name: str, scheme: AtLoad, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 128}
    base = make_model(name, **sizes)
    save_model(base, tmp_path)
    round_layers(base, scheme)
    zoo = {n: c for n, c in zoo_of(VARIANTS[name]).items() if n in ("rank16", "rank64_everything")}
    assert_parity_with(base, zoo, Driver(tmp_path, quantize=scheme, activations="bf16"))


def test_heads_and_embeddings_stay_as_they_are_stored(tmp_path: Path) -> None:
    folder = save_model(make_model("llama3"), tmp_path)
    model = read_config(folder)
    weights = load_weights(folder, model, torch.float32, CPU, packed=True, at_load="fp8")
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(weights.embed, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head.dequantised(), stored["lm_head.weight"])
    linears = [linear for layer in weights.layers for linear in layer.linears]
    assert all(isinstance(linear.weight, PackedMatrix) for linear in linears)


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS["awq"])
    with pytest.raises(ConfigError, match=r"--quantize fp8: .* quantised already \(AWQ, 4 bits"):
        served_as(read_config(tmp_path), "fp8")
    with pytest.raises(ConfigError, match="quantised already"):
        Driver(tmp_path, quantize="nf4")
