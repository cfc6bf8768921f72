"""Tables that are smaller than the base's, by the GPU's kernels in Triton's interpreter: as the
reference operations, which `test_resized_tables` holds to PEFT."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig

from tests.server.model.gpu_pair import Pair, assert_same, small_pair
from tests.server.model.hub_models import add_adapter, make_model
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need Triton's interpreter"
    ),
]
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
PLAIN, RESIZED = range(2)
BASE = -1
FIRST = 1000  # extent


@pytest.fixture(scope="module", params=["llama3", "gemma2"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    base, model = (make_model(request.param, **SMALL) for _ in range(2))
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model.resize_token_embeddings(93)
    resized = pack(add_adapter(model, "one", config, 7), "one", resized_from=base)
    folder: Path = tmp_path_factory.mktemp("base")
    with (
        pytest.MonkeyPatch.context() as patch,
        small_pair(base, {"plain": config}, folder, patch) as found,
    ):
        for driver in (found.reference, found.gpu):
            assert driver.load(RESIZED, *resized, FIRST).error is None
        yield found


def test_same_as_the_reference(pair: Pair) -> None:
    for slots in ([RESIZED, BASE, PLAIN], [RESIZED, RESIZED, PLAIN, BASE]):
        pair.graphs.clear()
        assert_same(pair, slots)
        assert -len(slots) in pair.graphs, "decodes"
        assert len(slots) not in pair.graphs
