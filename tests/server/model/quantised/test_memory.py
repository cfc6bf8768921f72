"""Bytes of quantised weights are known from config.json, and are those that are then taken."""

from pathlib import Path

import pytest
import torch

from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.ops.memory import weights_bytes
from loraplex.server.model.weights import load_weights
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import FORMATS

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_that_stay_quantised(form: str, tmp_path: Path) -> None:
    save_quantised(make_model("llama3", intermediate_size=128), tmp_path, FORMATS[form])
    model = read_config(tmp_path)
    dense, estimate = (weights_bytes(model, "float32", packed=packed) for packed in (False, True))
    weights = load_weights(tmp_path, model, torch.float32, CPU, packed=True)
    linears = [linear for layer in weights.layers for linear in layer.linears]
    kept = [linear for linear in linears if isinstance(linear.weight, PackedMatrix)]
    # Blocks of 24 x 40 are none of the kernels'.
    assert len(kept) == (0 if form in ("fp8-block", "ct-fp8-block") else len(linears))
    if kept:
        taken = sum(linear.nbytes for linear in linears)
        of_others = dense - sum(4 * x.out_features * x.in_features for x in linears)
        assert taken == pytest.approx(estimate - of_others, rel=0.3)


@pytest.mark.parametrize("form", ["nf4-nested", "awq", "fp8-tensor", "gptq-order"])
def test_what_stays_quantised_stands_for_the_same(form: str, tmp_path: Path) -> None:
    save_quantised(make_model("llama3", intermediate_size=128), tmp_path, FORMATS[form])
    model = read_config(tmp_path)
    plain, packed = (
        load_weights(tmp_path, model, torch.float32, CPU, packed=packed) for packed in (False, True)
    )
    for a, b in zip(plain.layers, packed.layers, strict=True):
        for linear, other in zip(a.linears, b.linears, strict=True):
            x = torch.randn(3, linear.in_features)
            torch.testing.assert_close(other.run(x), linear.run(x), rtol=1e-5, atol=1e-5)
