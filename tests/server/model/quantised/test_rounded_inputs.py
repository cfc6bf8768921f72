"""Checkpoints whose products round their inputs: as transformers and PEFT with the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from peft import LoraConfig

from loraplex.server.kernels.linear.row_form import INT8, RowForm
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, read_config
from loraplex.server.model.linear.quantised import RoundedLinear
from loraplex.server.model.spec.served_as import served_as
from loraplex.server.model.weights import load_weights
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.driver import Driver
from tests.server.model.families import parity
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.quantised.checkpoints import change_tensors, matrices, save_quantised
from tests.server.model.quantised.formats import (
    BY_TOKEN,
    FORMATS,
    FP8,
    Format,
    compressed,
    fp8,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
MOST = 448.0
Round = Callable[[torch.Tensor], torch.Tensor]


def by_scale(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    numbers = (x.float() / scale).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    return (numbers.float() * scale).to(x.dtype)


def by_token(most: float = float("inf")) -> Round:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return by_scale(x, x.float().abs().amax(-1, keepdim=True).clamp(max=most) / MOST)

    return rounded


def by_group(size: int) -> Round:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        starts = range(0, x.shape[-1], size)
        return torch.cat([by_token()(x[..., start : start + size]) for start in starts], dim=-1)

    return rounded


def in_int8(x: torch.Tensor) -> torch.Tensor:
    """Each token, by compressed-tensors' own functions."""
    args = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    found: torch.Tensor = fake_quantize(x, scale, zero, args)
    return found


def measured(x: torch.Tensor) -> torch.Tensor:
    return by_scale(x, 0.02)  # `formats.fp8_static` stores it


# As the checkpoint's float32 holds it.
MEASURED = RowForm(scale=float(torch.tensor(0.02)))
CASES: dict[str, tuple[Format, Round, RowForm]] = {
    "fp8-block": (FORMATS["fp8-block"], by_group(40), RowForm(40)),
    "fp8-tensor": (FORMATS["fp8-tensor"], by_token(), RowForm()),
    "fp8-static": (FORMATS["fp8-static"], measured, MEASURED),
    "fp8-bare": (FORMATS["fp8-bare"], measured, MEASURED),
    "fp8-channel": (FORMATS["fp8-channel"], by_token(1200.0), RowForm(most=1200.0)),
    "ct-fp8-channel": (FORMATS["ct-fp8-channel"], by_token(), RowForm()),
    "ct-fp8-tensor": (FORMATS["ct-fp8-tensor"], measured, MEASURED),
    "ct-fp8-group": (
        compressed(
            "float-quantized",
            {**FP8, "strategy": "group", "group_size": 16},
            {**BY_TOKEN, "strategy": "group", "group_size": 16},
        ),
        by_group(16),
        RowForm(16),
    ),
    "fp8-block-kernels": (fp8([32, 32]), by_group(32), RowForm(32)),
    "ct-int8-channel": (FORMATS["ct-int8-channel"], in_int8, RowForm(dtype=INT8)),
    "ct-int8-tensor": (FORMATS["ct-int8-tensor"], in_int8, RowForm(dtype=INT8)),
    "ct-int8-zeros": (FORMATS["ct-int8-zeros"], in_int8, RowForm(dtype=INT8)),
}


def with_rounded_inputs(model: Any, rounded: Round) -> None:
    """LoRA reads what comes before: its own modules have no such hook."""
    for _, module in matrices(model):
        module.register_forward_pre_hook(lambda _module, args: (rounded(args[0]), *args[1:]))


def adapters() -> dict[str, LoraConfig]:
    kept = ("rank3_rslora", "rank64_everything")
    return {n: config for n, config in zoo_of(VARIANTS["llama3"]).items() if n in kept}


@pytest.fixture(autouse=True)
def _borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input on the border of two numbers may become either's, by how a sum was added up."""
    monkeypatch.setattr(parity, "TOLERANCE", 0.06)


@pytest.mark.parametrize("name", CASES)
def test_with_mixed_adapters(name: str, tmp_path: Path) -> None:
    form, rounded, _ = CASES[name]
    base = make_model("llama3")
    save_quantised(base, tmp_path, form)
    with_rounded_inputs(base, rounded)
    parity.assert_parity_with(base, adapters(), Driver(tmp_path))


def test_inputs_that_stay_as_they_are_differ(tmp_path: Path) -> None:
    form, rounded, _ = CASES["fp8-tensor"]
    base = make_model("llama3")
    save_quantised(base, tmp_path, form)
    with_rounded_inputs(base, rounded)
    with pytest.raises(AssertionError):
        parity.assert_parity_with(base, adapters(), Driver(tmp_path, activations="bf16"))


def test_quantised_when_it_is_loaded(tmp_path: Path) -> None:
    base = make_model("llama3")
    save_model(base, tmp_path)
    with torch.no_grad():
        for _, module in matrices(base):
            scale = module.weight.abs().amax(1, keepdim=True) / MOST
            module.weight.copy_(by_scale(module.weight, scale))
    with_rounded_inputs(base, by_token())
    parity.assert_parity_with(base, adapters(), Driver(tmp_path, quantize="fp8"))


def linears(folder: Path, activations: Any = "auto") -> list[Any]:
    model = served_as(read_config(folder), None, activations)
    weights = load_weights(folder, model, torch.float32, torch.device("cpu"))
    return [linear for layer in weights.layers for linear in layer.linears]


@pytest.mark.parametrize("name", CASES)
def test_forms_and_the_option(name: str, tmp_path: Path) -> None:
    form, _, rows = CASES[name]
    save_quantised(make_model("llama3"), tmp_path, form)
    for linear in linears(tmp_path):
        assert isinstance(linear, RoundedLinear)
        assert linear.form == rows
    assert not any(isinstance(linear, RoundedLinear) for linear in linears(tmp_path, "bf16"))


@pytest.mark.parametrize("name", ["ct-fp8-weights", "ct-int8-packed", "awq"])
def test_forms_that_round_no_inputs(name: str, tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS[name])
    assert not any(isinstance(linear, RoundedLinear) for linear in linears(tmp_path))


def test_matrices_that_are_multiplied_at_once_share_the_largest_scale(tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS["fp8-static"])
    change_tensors(tmp_path, {"input_scale": torch.tensor(0.5)})
    qkv, o, gate_up, down, *_ = linears(tmp_path)
    scales = [linear.form.scale for linear in (qkv, o, gate_up, down)]
    assert scales == pytest.approx([0.02, 0.02, 0.02, 0.5])


@pytest.mark.parametrize("scale", [None, torch.tensor(0.0), torch.tensor(float("nan"))])
def test_a_scale_that_means_nothing(scale: torch.Tensor | None, tmp_path: Path) -> None:
    save_quantised(make_model("llama3"), tmp_path, FORMATS["fp8-static"])
    change_tensors(tmp_path, {"input_scale": scale})
    with pytest.raises(CheckpointError, match=r"down_proj\.input_scale must be a positive number"):
        linears(tmp_path)
    assert linears(tmp_path, "bf16")
