"""Speed of a change, measured on a real server: small numbers, to see that it measures."""

import json
from pathlib import Path

import pytest

from loraplex.launcher.bench.engine.offline import SHIPPED
from tests.launcher.test_bench_grid import TINY
from tools.bench.__main__ import main


@pytest.mark.exhaustive
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    llama = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    config = {**llama, **TINY, "vocab_size": 1024, "max_position_embeddings": 8192}
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    (tmp_path / "made").mkdir()
    places = ["--config", str(tmp_path / "shape"), "--folder", str(tmp_path / "made")]
    sizes = ["--rank", "1,4", "--many", "5", "--streams", "2", "--seconds", "2", "--loads", "3"]
    main(["changes", *places, "--device", "cpu", *sizes, "--json"])
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line]
    one, four, at_once, *gaps = found
    assert [one["rank"], four["rank"]] == [1, 4]
    for change in (one, four):
        assert min(change.values()) > 0
        assert change["put"] < change["put_first_token"]
    assert at_once["adapters_at_once"] == 5
    assert 0.0 < at_once["p50_s"] <= at_once["last_s"]
    assert [window["loads"] for window in gaps] == [0, 3, 0]
    assert all(0.0 <= window["p50"] <= window["p99"] <= window["max"] for window in gaps)
    assert not list((tmp_path / "made").iterdir()), "all files go at the end"
