"""Benches of the engine's parts, on a tiny model, the CPU and stand-ins."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from loraplex.launcher.bench.engine.offline import SHIPPED, Load, OfflineEngine
from tests.launcher.test_bench_grid import TINY
from tools.bench import lora_kernels as kernels
from tools.bench.__main__ import main


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_beside_prefill(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pooling: str,
) -> None:
    """The same prompts by turns; nothing is generated for vectors."""
    ran: list[Load] = []
    run = OfflineEngine.run

    def noted(engine: OfflineEngine, load: Load) -> float:
        ran.append(load)
        return run(engine, load)

    monkeypatch.setattr(OfflineEngine, "run", noted)
    load = ("--batch", "2", "--adapters", "0,2", "--rank", "4", "--prompt-tokens", "40")
    options = (*load, "--pooling", pooling, "--step-tokens", "24", "--dummy-weights", "--json")
    config = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **TINY}))
    main(["vectors", "--config", str(tmp_path), *options, "--device", "cpu", "--dtype", "float32"])
    points = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(p["B"], p["D"], p["r"]) for p in points] == [(2, 0, 0), (2, 2, 4)]
    for point in points:
        ratio = point["vector_tokens_per_s"] / point["prefill_tokens_per_s"]
        assert point["ratio"] == pytest.approx(ratio, rel=0.01, abs=0.002)
        assert point["vectors_per_s"] == pytest.approx(point["vector_tokens_per_s"] / 40, rel=0.05)
    timed = [each for each in ran if each.prompt_tokens == 40]
    assert [each.vector is not None for each in timed] == [False, True] * (len(timed) // 2)
    assert {each.vector.pooling for each in timed if each.vector is not None} == {pooling}


def lora_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph takes a millisecond; adapters of rank 64 find no room."""

    def adapters(ranks: list[int]) -> SimpleNamespace:
        if max(ranks) == 64:
            raise torch.OutOfMemoryError
        return SimpleNamespace(count=len(ranks))

    step = Mock(spec=kernels.TimedStep, few=None)
    monkeypatch.setattr(kernels, "Adapters", adapters)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda _: 4e12)
    monkeypatch.setattr(kernels, "_steps", lambda batches: dict.fromkeys(batches, step))
    monkeypatch.setattr(kernels, "graph_ms", lambda *_: 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_adapters_without_room_leave_the_others_of_lora_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lora_kernels_on_a_gpu(monkeypatch)
    main(["lora-kernels", "--json"])
    points = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(points) == len(kernels.POINTS) * len(kernels.RANKS)
    assert {(p["r"], p["added_ms"]) for p in points if p["r"] != "mix"} == {(16, 0.0), (64, None)}
    assert {p["added_ms"] for p in points if p["r"] == "mix"} == {0.0, None}
    main(["lora-kernels", "--rank", "64"])
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in table] == ["added_ms", *["-"] * len(kernels.POINTS)]


def test_lora_kernels_without_room_for_the_products(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lora_kernels_on_a_gpu(monkeypatch)
    monkeypatch.setattr(kernels, "_steps", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(SystemExit) as ended:
        main(["lora-kernels"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("loraplex: bench lora-kernels needs a GPU with")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "words",
    [
        ("vectors", "--dummy-weights"),
        ("make-model", "--device", "cuda", "--model", "/nowhere/made"),
    ],
)
def test_without_a_gpu(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*words, "--config", "llama-3.1-8b"])
    assert left.value.code == 1
    told = capsys.readouterr().err
    assert told == "loraplex: there is no CUDA device here: --device cpu needs none\n"
