"""Processes of one model carry out the same steps and hold the same adapters."""

from functools import partial
from pathlib import Path

import pytest

from tests.server.model.driver import generate
from tests.server.model.families.parity import Served, assert_parity
from tests.server.model.sharding.processes import GroupDriver

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


@pytest.mark.parametrize("shards", [2, 4])
def test_every_adapter_in_one_batch(shards: int, tmp_path: Path) -> None:
    make = partial(GroupDriver, shards=shards, meeting=tmp_path / "meeting")
    served = Served("llama3", tmp_path / "base", None, make, shards)
    pairs = served.streams((9, 2, 23, 14))
    generate(served.driver, [stream for _, stream in pairs], 3, 64)
    for adapter, stream in pairs:
        assert_parity(served.oracle, adapter, stream)
        stream.free()
    served.driver.close()
