"""Quantised models by the GPU's kernels, in Triton's interpreter, as by the reference operations.

In decode graphs and in steps with prompts, with adapters and without.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.model.linear.linear import MoeWeights
from tests.kernels.batches import interpreted
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.checkpoint.test_expert_tensors import mxfp4_model
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import Pair, assert_same, ordinary, small_pair
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import FORMATS
from tests.server.model.quantised.same_rounding import share_rounding
from tests.server.model.quantised.test_places import quantise_stored

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT compares patterns with modules alone, though they hold for parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    # Infinity is meant.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    interpreted,
]
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
ROWS = [
    ("llama3", "fp8-block-powers-of-two"),
    ("qwen2", "gptq-order"),
    ("phi3", "nf4-nested"),
    ("llama3", "awq"),
    ("llama3", "ct-int8-zeros"),
    ("llama3", "ct-int4-channel"),
    ("llama3", "fp8-tensor"),
]


def pairs(count: int) -> pytest.MarkDecorator:
    """So many of the rows in an ordinary run, the others with `make test-all`."""
    each = ordinary(ROWS, ROWS[:count])
    return pytest.mark.parametrize("pair", each, indirect=True, scope="module")


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name, form = request.param
    zoo = zoo_of(VARIANTS[name])
    adapters = {each: zoo[each] for each in ("rank64_everything", "rank3_rslora")}
    adapters["dora"] = LoraConfig(r=4, target_modules=[*VARIANTS[name].targets], use_dora=True)
    model, folder = make_model(name, **SMALL), tmp_path_factory.mktemp("base")
    save_quantised(model, folder, FORMATS[form])
    with (
        pytest.MonkeyPatch.context() as patch,
        small_pair(model, adapters, folder, patch, dora_graphs=True) as found,
    ):
        share_rounding(found, patch)
        yield found


@pytest.fixture(params=["mxfp4", pytest.param("nf4-nested", marks=pytest.mark.exhaustive)])
def experts(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """A model with quantised experts, and adapters on them."""
    if request.param == "mxfp4":
        name, model = "gpt-oss", mxfp4_model(tmp_path, intermediate_size=64)
    else:
        name, sizes = "qwen3-moe", {"hidden_size": 64, "moe_intermediate_size": 64}
        pattern = r".*experts\.[0-9]+\..*\.weight"
        model = quantise_stored(make_model(name, **sizes), tmp_path, request.param, pattern)
    adapters = VARIANTS[name].others()
    with small_pair(model, adapters, tmp_path, monkeypatch) as found:
        yield found


@pairs(1)
def test_same_as_the_reference(pair: Pair) -> None:
    layers = pair.gpu.executor._decoder.weights.layers
    assert all(isinstance(linear.weight, PackedMatrix) for x in layers for linear in x.linears)
    assert_same(pair, [0, -1, 1])


@pytest.mark.exhaustive
@pairs(1)
def test_dora_as_the_reference(pair: Pair) -> None:
    """Lengths are of the matrix that the kernels multiply with."""
    assert_same(pair, [2, -1, 1])


def test_experts_as_the_reference(experts: Pair) -> None:
    for layer in experts.gpu.executor._decoder.weights.layers:
        assert isinstance(layer.branches[1], MoeWeights)
        assert isinstance(layer.branches[1].gate_up.weight, PackedMatrix)
        assert isinstance(layer.branches[1].down.weight, PackedMatrix)
    assert_same(experts, [0, -1, 1])
