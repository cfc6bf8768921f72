"""`loraplex batch` with a server of its own, on an engine without a model."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.certifying.factory import certify
from tests.grids import beyond
from tests.launcher.batch.batch_files import line, numbers, records, write
from tests.tethered import tethered

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240.0


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    files = [str(folder / "in.jsonl"), "--out", str(folder / "out.jsonl")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    return subprocess.run(
        tethered(sys.executable, "-m", "loraplex", "batch", *files, *options),
        cwd=ROOT,
        env=kept | {"LORAPLEX_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def body(adapter: str) -> dict[str, object]:
    return {"inputs": "hello", "parameters": {"adapter_id": adapter, "max_new_tokens": 3}}


def test_it_serves_as_long_as_it_runs(tmp_path: Path) -> None:
    lines = [line(f"{i}", "/generate", body(("sql", "json")[i % 2])) for i in range(40)]
    write(tmp_path / "in.jsonl", lines)
    done = run(tmp_path, "--executor", certify(step_s=0.002), "--kv-memory", "64MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(tmp_path / "out.jsonl") == [*range(1, 41)]
    (first, *_) = records(tmp_path / "out.jsonl")
    assert first["response"]["body"]["generated_text"]
    assert "40 of 40 lines have an answer" in done.stderr
    ours = str(tmp_path / "cache")
    assert not [p for p in psutil.process_iter(["cmdline"]) if ours in str(p.info["cmdline"])]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    beyond(
        2,
        [
            (["--kv-memory", "lots"], 2, "--kv-memory must be a size"),
            (["--model", "/nowhere"], 1, "/nowhere"),
            (["--adapter", "x"], 2, "--adapter must be NAME=REF"),
            (["--adapter", "a+b=local:/x"], 2, "'+' is not allowed in a name"),
        ],
    ),
)
def test_what_cannot_be_served(tmp_path: Path, options: list[str], code: int, words: str) -> None:
    write(tmp_path / "in.jsonl", [line("a", "/generate", body("sql"))])
    done = run(tmp_path, *options)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "out.jsonl").exists()
