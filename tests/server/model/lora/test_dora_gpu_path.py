"""DoRA, biases and own tables by the GPU's kernels, in Triton's interpreter: as the reference
operations, which the other tests here hold to PEFT."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from loraplex.server.model.lora.lora import Reach
from tests.grids import beyond
from tests.kernels.batches import interpreted
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import Pair, assert_same, ordinary, small_pair
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.lora.dora_adapters import dora_adapters
from tests.server.model.lora.own_tables_pair import own_tables, own_tables_pair

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    interpreted,
]
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
# Biases and tied tables; norms of all heads, which want the sum first; one module of q, k and v.
SERVED: dict[tuple[str, str], dict[str, Any]] = {
    ("llama-biases-tied", "fa2"): {},
    ("olmo2", "fa3"): {},
    ("phi3", "fa3"): {"hidden_size": 64},
    ("deepseek-v3", "fa3"): {"hidden_size": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
}
PLAIN, DORA, FEW, TABLES = range(4)
BASE = -1


@pytest.fixture(scope="module", params=ordinary(SERVED, {("llama-biases-tied", "fa2")}))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name, backend = request.param
    model = make_model(name, **{**SMALL, **SERVED[request.param]})
    adapters: dict[str, LoraConfig] = dora_adapters(VARIANTS[name])
    folder: Path = tmp_path_factory.mktemp("base")
    with (
        pytest.MonkeyPatch.context() as patch,
        small_pair(model, adapters, folder, patch, backend=backend, dora_graphs=True) as found,
    ):
        yield found


@pytest.mark.parametrize(
    "slots",
    beyond(1, [[DORA, BASE, PLAIN, FEW], [FEW], [PLAIN, BASE, PLAIN], [DORA, PLAIN, BASE, DORA]]),
)
def test_same_as_the_reference(pair: Pair, slots: list[int]) -> None:
    """In decode graphs and in graphs of prompts."""
    pair.graphs.clear()
    assert_same(pair, slots)
    assert len(slots) in pair.graphs


@pytest.mark.parametrize(
    "slots", beyond(0, [[TABLES, DORA, BASE], [TABLES, DORA, BASE, PLAIN], [TABLES, BASE] * 2])
)
def test_tables_lie_around_graphs(pair: Pair, slots: list[int]) -> None:
    pair.graphs.clear()
    assert_same(pair, slots)
    assert -len(slots) in pair.graphs, "decodes"
    assert len(slots) not in pair.graphs
    assert_same(pair, [PLAIN, BASE])  # takes nothing of theirs


@pytest.mark.exhaustive
def test_without_graphs_of_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where `--dora-graphs` is not given."""
    executor: Any = pair.gpu.executor
    for graphs, name in ((executor._graphs, "_graphs"), (executor._token_graphs, "_captured")):
        kept = {key: of for key, of in getattr(graphs, name).items() if key[1] != Reach.OUTPUTS}
        assert len(kept) < len(getattr(graphs, name))
        monkeypatch.setattr(graphs, name, kept)
    pair.graphs.clear()
    assert_same(pair, [DORA, BASE, PLAIN], in_graphs=False)
    assert 3 not in pair.graphs


def test_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of B, and in place of the base's, also where there is no LoRA."""
    model = make_model("llama-biases-tied", **SMALL)
    save_model(model, tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)  # the adapter's
    adapters = {
        "plain": LoraConfig(r=4, target_modules=["q_proj", "up_proj"]),
        "biased": LoraConfig(r=4, target_modules=["q_proj", "up_proj"], bias="all", lora_bias=True),
    }
    with small_pair(model, adapters, tmp_path, monkeypatch, dora_graphs=True) as pair:
        assert_same(pair, [1, BASE])
        assert 2 in pair.graphs


@own_tables(1)
def test_tables_of_their_own(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_tables_pair(tables, SMALL, tmp_path, monkeypatch) as pair:
        assert_same(pair, [0, BASE])
        assert -2 in pair.graphs
        pair.graphs.clear()
        assert_same(pair, [BASE, BASE])
        assert 2 in pair.graphs


@pytest.mark.exhaustive
def test_a_head_with_a_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"modules_to_save": ["lm_head"]}
    with own_tables_pair(whole, SMALL, tmp_path, monkeypatch, "phi") as pair:
        assert_same(pair, [0, BASE])
        assert -2 in pair.graphs
