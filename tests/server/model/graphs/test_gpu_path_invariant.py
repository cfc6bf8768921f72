"""`--batch-invariant` by the GPU's kernels, in Triton's interpreter: as the reference operations,
and with the same bits in every batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tests.grids import beyond
from tests.kernels.batches import interpreted
from tests.kernels.interpreter import exact_products
from tests.server.model.adapter_zoo import few_of
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import Pair, assert_same, ordinary, small_pair
from tests.server.model.hub_models import make_model
from tests.server.model.invariance import Ask, ask_all, resumed
from tests.server.model.lora.dora_adapters import dora_adapters

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    interpreted,
]
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 144}
ROWS = [("llama3", "fa2"), ("gemma2", "fa2")]
BASE = -1


@pytest.fixture(scope="module", params=ordinary(ROWS, {ROWS[1]}))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name, backend = request.param
    variant = VARIANTS[name]
    adapters: dict[str, LoraConfig] = {**few_of(variant), **dora_adapters(variant)}
    folder: Path = tmp_path_factory.mktemp("base")
    options: dict[str, Any] = {"batch_invariant": True, "dora_graphs": True}
    with (
        pytest.MonkeyPatch.context() as patch,
        exact_products(),
        small_pair(
            make_model(name, **SMALL), adapters, folder, patch, backend=backend, **options
        ) as found,
    ):
        yield found


@pytest.mark.parametrize("slots", beyond(1, [[0, BASE, 1, 4], [6]]))
def test_same_as_the_reference(pair: Pair, slots: list[int]) -> None:
    """Decodes too are computed by the graphs of prompts."""
    pair.graphs.clear()
    assert_same(pair, slots)
    assert -len(slots) in pair.graphs
    assert all(tokens < 0 for tokens in pair.graphs)


@pytest.mark.parametrize("slot", beyond(1, [1, BASE, 4]))
def test_same_bits_in_every_batch(pair: Pair, slot: int) -> None:
    own = Ask(21, slot, seed=5)
    (alone,) = ask_all(pair.gpu, [own], 3)
    same = [Ask(9, slot, seed=6, chunk=4), Ask(3, slot, seed=7)]
    others = [Ask(13, 0, seed=8, chunk=5), Ask(2, 6, seed=9), Ask(1, BASE)]
    assert ask_all(pair.gpu, [*same, own._replace(chunk=6)], 3)[-1] == alone
    assert ask_all(pair.gpu, [own._replace(chunk=11), *others], 3)[0] == alone
    assert resumed(pair.gpu, own._replace(chunk=10), alone, 2, others[:2]) == alone
