"""`loraplex bench prompt-attention` without a GPU: its points, floors and refusals."""

import json
from typing import Any

import pytest
import torch

from loraplex.launcher.__main__ import main
from loraplex.launcher.bench.engine import prompt_times
from loraplex.launcher.bench.engine.prompt_times import visible_pairs


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every graph takes two milliseconds, and a GPU makes 1e12 operations a second. Returns what
    would be launched."""
    launched: list[tuple[Any, ...]] = []

    def launch(*point: Any) -> None:
        launched.append(point)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prompt_times, "matrix_rate", lambda *_: 1e12)
    monkeypatch.setattr(prompt_times, "_launch", launch)
    monkeypatch.setattr(prompt_times, "graph_ms", lambda *_: 2.0)
    return launched


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (5, 0), (4, 9)])
def test_pairs_are_those_that_a_mask_leaves(tokens: int, before: int, window: int | None) -> None:
    pairs = [
        (query, key)
        for query in range(before, before + tokens)
        for key in range(query + 1)
        if window is None or key > query - window
    ]
    assert visible_pairs(tokens, before, window) == len(pairs)


def test_each_point_beside_its_floor(
    on_a_gpu: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--heads", "16", "--kv-heads", "8", "--head-size", "256", "--window", "4096")
    grid = ("--softcap", "50", "--chunks", "1,2", "--tokens", "8192", "--before", "0,64")
    main(["bench", "prompt-attention", *shape, *grid, "--json"])
    points = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(p["chunks"], p["before"]) for p in points] == [(1, 0), (1, 64), (2, 0), (2, 64)]
    flops = 4 * 256 * 16 * visible_pairs(8192, 64, 4096)
    assert points[1]["floor_ms"] == pytest.approx(flops / 1e9, abs=1e-3)
    assert points[1]["ms"] == 2.0
    layer, *point = on_a_gpu[3]
    assert point == [2, 8192, 64]
    assert (layer.rule.window, layer.rule.softcap, layer.rule.scale) == (4096, 50.0, 1 / 16)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_person_reads_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "prompt-attention", "--chunks", "1", "--tokens", "512", "--sinks"])
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["chunks", "tokens", "before", "ms", "floor_ms"]
    assert row.split()[:4] == ["1", "512", "0", "2.0"]


@pytest.mark.usefixtures("on_a_gpu")
def test_heads_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "prompt-attention", "--heads", "9", "--kv-heads", "2"])
    assert ended.value.code == 1
    assert "9 query heads are no multiple of 2 kv heads" in capsys.readouterr().err
