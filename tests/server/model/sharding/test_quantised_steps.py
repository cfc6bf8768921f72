"""Processes that each read their part of a quantised checkpoint compute what one computes."""

from pathlib import Path

import pytest

from tests.grids import beyond
from tests.server.model.adapter_zoo import with_zoo
from tests.server.model.driver import Driver
from tests.server.model.families.parity import GREEDY
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import FORMATS
from tests.server.model.sharding.near import assert_near, load_adapters, run
from tests.server.model.sharding.processes import GroupDriver

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
# With sorted inputs, and of each layout.
ROWS = beyond(
    1, [("gptq-order", 2), ("awq", 2), ("gptq-order", 4), ("nf4-nested", 4), ("fp8-block", 4)]
)
ADAPTERS = ("rank3_rslora", "rank64_everything")


@pytest.mark.parametrize(("form", "shards"), ROWS)
def test_the_same_as_one_process(form: str, shards: int, tmp_path: Path) -> None:
    """Inputs stay as they are, since each process would round its part of `o_proj`'s and
    `down_proj`'s inputs by itself."""
    model = make_model("llama3")
    folder = save_quantised(model, tmp_path / "base", FORMATS[form])
    oracle = with_zoo(model)
    one = Driver(folder, activations="bf16")
    several = GroupDriver(folder, shards, tmp_path / "meeting", activations="bf16")
    slots = [-1, *load_adapters(one, oracle, 1, ADAPTERS).values()]
    load_adapters(several, oracle, shards, ADAPTERS)
    assert_near(run(several, slots, GREEDY), run(one, slots, GREEDY))
    one.close()
    several.close()
