"""Random weights have the layouts and the sizes that a configuration's quantised ones have."""

import json
from pathlib import Path

import pytest
import torch

from loraplex.launcher.bench.engine.random_weights import STD, random_packed, random_weights
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.linear.quantised import matrix_of
from loraplex.server.model.quantisation.forms import packed_bytes
from loraplex.server.model.quantisation.read import read_quantisation
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.quantised.formats import FORMATS

CPU = torch.device("cpu")
SHAPE = (96, 512)


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_of_each_form(name: str) -> None:
    form = read_quantisation(FORMATS[name].config).form("model.layers.0.mlp.up_proj")
    assert form is not None
    weight = random_packed(form, SHAPE, STD, CPU)
    values = weight.dequantised(torch.empty(SHAPE))
    assert values.std().item() == pytest.approx(STD, rel=0.35)
    assert weight.nbytes == pytest.approx(packed_bytes(form, *SHAPE), rel=0.3)
    # Blocks of 24 x 40 are none of the kernels'.
    assert (matrix_of(weight) is None) == (name in ("fp8-block", "ct-fp8-block"))


def test_a_model(tmp_path: Path) -> None:
    folder = save_model(make_model("llama3"), tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": FORMATS["awq"].config}))
    weights = random_weights(read_config(folder), torch.float32, CPU)
    up = weights.layers[0].linears[2].dequantised()
    assert len(set(up[:, :16].flatten().tolist())) < 16 * len(up) / 2
    assert len(set(weights.lm_head.dequantised().flatten().tolist())) > 97 * 60
