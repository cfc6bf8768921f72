"""A short run of `churn`, which runs at any length by its own command."""

from pathlib import Path

from tests.server.worker.churn import churn

OPERATIONS = 3_000


def test_no_token_is_wrong_and_nothing_is_lost_whatever_comes_and_goes(tmp_path: Path) -> None:
    report = churn(tmp_path, OPERATIONS, seed=1, kill_every=1_000)
    print(report)
    assert report["wrong"] == []
    assert report["tokens_checked"] > OPERATIONS
    assert report["engine_kills"] > 0
    evictions = "adapter_evictions_total"
    for tier in ("device", "host"):
        assert report["worker"][f'{evictions}{{reason="bytes",tier="{tier}"}}'] > 0
        assert report["worker"][f'{evictions}{{reason="order",tier="{tier}"}}'] > 0
