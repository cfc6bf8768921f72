"""A short run of `churn`, which runs at any length by its own command."""

from pathlib import Path

import pytest

from tests.grids import beyond
from tests.server.worker.churn import churn


@pytest.mark.parametrize("operations", beyond(1, [600, 3_000]))
def test_no_token_is_wrong_and_nothing_is_lost_whatever_comes_and_goes(
    tmp_path: Path, operations: int
) -> None:
    report = churn(tmp_path, operations, seed=1, kill_every=operations // 3)
    print(report)
    assert report["wrong"] == []
    assert report["tokens_checked"] > operations
    assert report["engine_kills"] > 0
    evictions = "adapter_evictions_total"
    for tier in ("device", "host"):
        assert report["worker"][f'{evictions}{{reason="bytes",tier="{tier}"}}'] > 0
        assert report["worker"][f'{evictions}{{reason="order",tier="{tier}"}}'] > 0
