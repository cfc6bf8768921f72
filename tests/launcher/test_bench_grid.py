"""The offline benchmarks run the real engine; here on a tiny model and the CPU."""

import json
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.bench.grid import Grid, adapter_bytes, engine_for, step_bytes
from launcher.bench.offline import SHIPPED, model_folder

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    config = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **TINY}))
    return tmp_path


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, float]]:
    main(
        ["bench", *arguments, "--dummy-weights", "--device", "cpu", "--dtype", "float32", "--json"]
    )
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_decode(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "1,3", "--adapters", "0,2", "--rank", "4,8", "--prompt-tokens", "9")
    points = bench(capsys, "decode", "--config", str(tiny), *options, "--output-tokens", "24")
    assert [(p["B"], p["D"], p["r"]) for p in points] == [
        (1, 0, 0),
        (3, 0, 0),
        (3, 2, 4),
        (3, 2, 8),
    ]
    assert all(p["floor_ms"] >= 0 for p in points)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output-tokens", "16"], "more than 16"),
        (["--batch", "0"], "--batch"),
        (["--batch", "2", "--adapters", "4"], "--batch"),
        (["--prompt-tokens", "0"], "tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        bench(capsys, "decode", "--config", str(tiny), *options)


def test_more_adapters_than_a_server_has_slots(tiny: Path) -> None:
    grid = Grid(tiny, "cpu", "float32", (300,), (300,), (1,), 1, 24)
    engine = engine_for(grid, 512)
    assert engine.executor.limits.adapter_slots == 300
    engine.close()


def test_sampling(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("decode", "--config", str(tiny), "--batch", "1", "--adapters", "0")
    hot = '{"temperature": 0.8, "top_p": 0.9, "logprobs": 1}'
    (point,) = bench(capsys, *options, "--output-tokens", "18", "--sampling", hot)
    assert point["B"] == 1
    for bad in ("{", "[]", '{"temperature": "hot"}', '{"heat": 1}'):
        with pytest.raises(SystemExit, match="--sampling"):
            bench(capsys, *options, "--sampling", bad)


def test_llama_8b_by_name() -> None:
    """The design's figures: 15.0 GB of weights, 5 MiB a rank, 128 KiB a token."""
    grid = Grid(model_folder("llama-3.1-8b"), "cpu", "bfloat16", (8,), (0, 8), (16,), 128, 144)
    assert adapter_bytes(grid, 16) == 80 << 20
    base = step_bytes(grid, (8, 0, 16))
    assert base == pytest.approx(15.01e9 + 8 * 208 * (128 << 10), rel=1e-3)
    assert step_bytes(grid, (8, 8, 16)) == base + 8 * (80 << 20)
