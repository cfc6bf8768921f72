"""Parts of quantised matrices are those of the whole, dequantised."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.base import Shard
from loraplex.server.model.checkpoint.area import whole
from loraplex.server.model.checkpoint.checkpoint import model_shards, read_config, stored_tensors
from loraplex.server.model.checkpoint.stored_forms import stored_forms
from loraplex.server.model.checkpoint.unpack import cut_of
from loraplex.server.model.spec.model_spec import layer_path
from loraplex.server.model.weight_source import WeightSource
from loraplex.server.model.weights import load_weights
from tests.grids import beyond
from tests.server.model.checkpoint.test_expert_tensors import mxfp4_model
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import FORMATS
from tests.server.model.quantised.test_rounded_inputs import CASES
from tests.server.model.sharding.bytes_read import BytesRead, bytes_read

pytestmark = pytest.mark.filterwarnings("ignore")
SHARDS = 2


@pytest.mark.parametrize("inner", [160, 77, 44])
@pytest.mark.parametrize("form", ["nf4-nested", "fp8-block", "ct-int8-zeros", "ct-int4-channel"])
def test_odd_widths(form: str, inner: int, tmp_path: Path) -> None:
    """Borders within bytes, words and blocks, and zeros that fill parts up."""
    model = make_model("llama3", intermediate_size=inner)
    save_quantised(model, tmp_path, FORMATS[form])
    config = read_config(tmp_path)
    load: Any = partial(load_weights, tmp_path, config, torch.float32, torch.device("cpu"))
    for count in (2, 4):
        parts = [load(shard=Shard(index, count)).layers[1].branches[1] for index in range(count)]
        mlp = load().layers[1].branches[1]
        down = torch.cat([part.down.weight for part in parts], 1)
        assert torch.equal(down[:, :inner], mlp.down.weight)
        assert not down[:, inner:].any()
        up = torch.cat([part.gate_up.weight.chunk(2)[1] for part in parts])
        assert torch.equal(up[:inner], mlp.gate_up.weight[inner:])


@pytest.mark.parametrize("name", ["fp8-block", "fp8-static", "fp8-channel", "ct-int8-channel"])
def test_a_device_rounds_its_part_of_inputs(name: str, tmp_path: Path) -> None:
    """By the scales of that part, whose groups begin with its first input."""
    form, rounded, _ = CASES[name]
    save_quantised(make_model("llama3"), tmp_path, form)
    model = read_config(tmp_path)
    torch.manual_seed(0)
    for index, count in ((0, 2), (3, 4)):
        shard = Shard(index, count)
        part = load_weights(tmp_path, model, torch.float32, torch.device("cpu"), shard=shard)
        for linear in part.layers[1].linears:
            x = torch.randn(5, linear.in_features)
            expected = rounded(x[None])[0] @ linear.dequantised().T
            torch.testing.assert_close(linear.run(x), expected, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(linear.run(x), x @ linear.dequantised().T, atol=1e-3)


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_quantised(make_model("llama3", intermediate_size=256), tmp_path, FORMATS[request.param])
    return tmp_path


def test_matrices_of_layers(folder: Path) -> None:
    """Exactly: each number is dequantised as in the whole."""
    model = read_config(folder)
    load: Any = partial(load_weights, folder, model, torch.float32, torch.device("cpu"))
    alone, parts = load(), [load(shard=Shard(index, SHARDS)) for index in range(SHARDS)]
    spec = model.layers[0]
    for number, linear in enumerate(spec.linears):
        matrix = alone.layers[1].linears[number].weight
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
            read = partial(source._unpacked, path, cut.whole)
            mine = cut.packed(read)
            if mine is None:
                continue
            kept.add(linear.sharding)
            matrix = read(whole(cut.whole)).weight.dequantised(torch.empty(cut.whole))
            expected = torch.zeros(cut.shape)
            cut.copy(matrix, expected)
            assert torch.equal(mine.dequantised(torch.empty(mine.shape)), expected), path
    assert "column" in kept, "no part stays quantised"
    print("parts by input features stay quantised:", "row" in kept)


# Inputs of a block of the checkpoint that no border of devices falls on.
BLOCKS = {"fp8-block": 40, "ct-fp8-block": 40}
NUMBERS = ("weight", "qweight", "weight_packed")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# Of safetensors, which looks at a byte of what it maps.
FEW = 1e-3


def read_by(folder: Path, shard: Shard, packed: bool, monkeypatch: pytest.MonkeyPatch) -> BytesRead:
    with bytes_read(monkeypatch) as counter:
        load_weights(
            folder,
            read_config(folder),
            torch.float32,
            torch.device("cpu"),
            packed=packed,
            shard=shard,
        )
    return counter


WAYS = [(False, 2), (True, 2), (False, 4)]
ONE_OF_A_LAYOUT = (
    *("fp8-block", "ct-int8-zeros", "awq", "gptq-order", "nf4-nested"),
    *("int8-rowwise", "ct-nvfp4", "modelopt-nvfp4", "fp8-channel"),
)


@pytest.mark.parametrize(
    ("form", "way"),
    [
        *((form, WAYS[i % 3]) for i, form in enumerate(ONE_OF_A_LAYOUT)),
        *beyond(0, [(form, way) for form in FORMATS for way in WAYS]),
    ],
)
def test_bytes_that_a_process_reads(
    form: str, way: tuple[bool, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own numbers and whole blocks around them. All processes together read all."""
    packed, count = way
    save_quantised(make_model("llama3", **SIZES), tmp_path, FORMATS[form])
    read = [read_by(tmp_path, Shard(i, count), packed, monkeypatch) for i in range(count)]
    most = 1 / count + 2 * BLOCKS.get(form, 0) / SIZES["intermediate_size"] + FEW
    for module in ("mlp.down_proj", "mlp.up_proj"):
        names = [f"model.layers.0.{module}.{each}" for each in NUMBERS]
        (name,) = (each for each in names if each in read[0].of_each)
        assert all(counter.share(name) <= most for counter in read), name
        if not packed:  # what stays quantised on the CPU may be a view of the file
            assert torch.stack([counter.of_each[name] for counter in read]).any(0).all(), name


def test_rows_that_end_within_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 160 inputs and blocks of 64 a process reads three parts of 32 for its 80. Rows of 77
    inputs end within a byte, and are read whole."""
    model = make_model("llama3", intermediate_size=160)
    even = save_quantised(model, tmp_path / "even", FORMATS["nf4-nested"])
    counter = read_by(even, Shard(0, SHARDS), False, monkeypatch)
    assert counter.share("model.layers.0.mlp.down_proj.weight") == pytest.approx(0.6, abs=FEW)
    assert counter.share("model.layers.0.mlp.up_proj.weight") == pytest.approx(0.5, abs=FEW)
    model = make_model("llama3", intermediate_size=77)
    odd = save_quantised(model, tmp_path / "odd", FORMATS["nf4-nested"])
    counter = read_by(odd, Shard(1, SHARDS), False, monkeypatch)
    assert counter.share("model.layers.0.mlp.down_proj.weight") == 1
    assert counter.share("model.layers.0.mlp.up_proj.weight") == pytest.approx(37 / 77, abs=FEW)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inner", [128, 96])
def test_experts_in_mxfp4(
    inner: int, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 96 inputs in blocks of 32 each process reads two blocks for its 48."""
    mxfp4_model(tmp_path, intermediate_size=inner)
    read = [read_by(tmp_path, Shard(i, SHARDS), packed, monkeypatch) for i in range(SHARDS)]
    path = "model.layers.0.mlp.experts"
    for name in ("gate_up_proj_blocks", "down_proj_blocks"):
        most = 2 / 3 if name.startswith("down") and inner == 96 else 1 / 2
        shares = [counter.share(f"{path}.{name}") for counter in read]
        assert shares == pytest.approx([most] * SHARDS, abs=FEW), name


@pytest.mark.parametrize("inner", [128, 96])
def test_parts_of_experts_in_mxfp4(inner: int, tmp_path: Path) -> None:
    mxfp4_model(tmp_path, intermediate_size=inner)
    model = read_config(tmp_path)
    load: Any = partial(load_weights, tmp_path, model, torch.float32, torch.device("cpu"))
    mlp, parts = (
        load().layers[1].branches[1],
        [load(shard=Shard(i, 2)).layers[1].branches[1] for i in range(2)],
    )
    down = torch.cat([part.down.weight for part in parts], 2)
    assert torch.equal(down, mlp.down.weight)
    halves = [part.gate_up.weight.chunk(2, 1) for part in parts]
    gate_up = torch.cat([torch.cat(each, 1) for each in zip(*halves, strict=True)], 1)
    assert torch.equal(gate_up, mlp.gate_up.weight)
