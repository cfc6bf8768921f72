"""Norms that adapters bring, by the GPU's kernels in Triton's interpreter: as the reference
operations, which `test_own_norms` holds to PEFT."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig

from tests.grids import beyond
from tests.kernels.batches import interpreted
from tests.server.model.gpu_pair import Pair, assert_same, small_pair
from tests.server.model.hub_models import make_model
from tests.server.model.lora.norm_adapters import saved_norms, targets_of, with_norms

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    interpreted,
]
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
PLAIN, EVERY, END = range(3)
BASE = -1
FIRST = 1000  # extent


@pytest.fixture(
    scope="module",
    params=beyond(1, ["llama3", "gemma2", "gpt-neox", "olmo2", "qwen3"]),
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    family = request.param
    base, options = make_model(family, **SMALL), saved_norms(family)
    folder: Path = tmp_path_factory.mktemp("base")
    config = LoraConfig(r=4, target_modules=targets_of(family))
    first = FIRST
    with (
        pytest.MonkeyPatch.context() as patch,
        small_pair(base, {"plain": config}, folder, patch) as found,
    ):
        for slot, name in ((EVERY, "every"), (END, "end")):
            _, layout, slab = with_norms(family, slot, options[name], **SMALL)
            for driver in (found.reference, found.gpu):
                assert driver.load(slot, layout, slab, first).error is None
            first += sum(layout.runs)
        yield found


@pytest.mark.parametrize("slots", beyond(1, [[EVERY, END, BASE], [EVERY, END, PLAIN, BASE]]))
def test_same_as_the_reference_outside_graphs(pair: Pair, slots: list[int]) -> None:
    pair.graphs.clear()
    assert_same(pair, slots, in_graphs=False)
    assert len(slots) not in pair.graphs


def test_plain_steps_stay_in_graphs(pair: Pair) -> None:
    pair.graphs.clear()
    assert_same(pair, [PLAIN, BASE])
    assert pair.graphs
