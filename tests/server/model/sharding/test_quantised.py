"""Parts of quantised matrices are those of the whole, dequantised."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.sharding import Shard
from server.model.checkpoint.checkpoint import read_config, stored_tensors
from server.model.checkpoint.cuts import cut_of
from server.model.checkpoint.stored_forms import stored_forms
from server.model.checkpoint.text_part import model_shards
from server.model.spec import layer_path
from server.model.weight_source import WeightSource
from server.model.weights import load_weights
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore")
SHARDS = 2


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_quantised(make_model("llama3", intermediate_size=256), tmp_path, FORMATS[request.param])
    return tmp_path


def test_matrices_of_layers(folder: Path) -> None:
    """Exactly: each number is dequantised as in the whole."""
    model = read_config(folder)
    load: Any = partial(load_weights, folder, model, torch.float32, torch.device("cpu"))
    whole, parts = load(), [load(shard=Shard(index, SHARDS)) for index in range(SHARDS)]
    spec = model.layers[0]
    for number, linear in enumerate(spec.linears):
        matrix = whole.layers[1].linears[number].weight
        found = [part.layers[1].linears[number].weight for part in parts]
        if linear.sharding == "row":
            assert torch.equal(torch.cat(found, 1), matrix)
            continue
        of_parts = [part.split([w // SHARDS for w in linear.widths]) for part in found]
        assert torch.equal(torch.cat([torch.cat(of) for of in zip(*of_parts, strict=True)]), matrix)


def test_packed_parts(folder: Path) -> None:
    """What stays quantised has the values of the whole, where a part is a matrix by itself."""
    model = read_config(folder)
    files = model_shards(folder, model)
    forms = stored_forms(model, stored_tensors(files))
    source: Any = WeightSource(
        files, forms, torch.float32, torch.device("cpu"), packed=True, at_load=None
    )
    kept = set()
    for linear in model.layers[0].linears:
        for part in linear.parts:
            path = layer_path(0, part.path)
            if path not in forms:
                continue
            cut = cut_of(linear, part, Shard(1, SHARDS))
            packed = source._unpacked(path, cut.whole)
            mine = cut.of_packed(packed)
            if mine is None:
                continue
            kept.add(linear.sharding)
            matrix = packed.dequantised(torch.empty(packed.shape)).view(cut.whole)
            expected = torch.zeros(cut.shape)
            cut.copy(matrix, expected)
            assert torch.equal(mine.dequantised(torch.empty(mine.shape)), expected), path
    assert "column" in kept, "no part stays quantised"
    print("parts by input features stay quantised:", "row" in kept)
