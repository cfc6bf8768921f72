"""TRL's AsyncGRPO against two workers: each answer is of the version asked for, and it learns."""

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import ROOT, Serving, start_serving

TRAINERS_PYTHON = ROOT / ".venv-trainers/bin/python"
SCRIPT = Path(__file__).parent / "clients" / "trl_grpo.py"
STEPS, STALENESS = 50, 4

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.clients,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        not TRAINERS_PYTHON.exists(), reason="`make test-all` makes the environment for TRL"
    ),
]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Serving]:
    (tmp_path / "policies").mkdir()
    server = start_serving(
        *("--workers", "2", "--dtype", "float32", "--logprobs-mode", "processed_logprobs"),
        *("--adapter-root", str(tmp_path / "policies"), "--cache-dir", str(tmp_path / "cache")),
        log=tmp_path / "log",
        environ={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield server
    server.process.terminate()
    assert server.process.wait(timeout=240) == 0, server.log.read_text()[-4000:]


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_async_grpo(fleet: Serving, tmp_path: Path, seed: int) -> None:
    model, run = ROOT / "launcher/demo/model", tmp_path / "policies" / "run"
    arguments = [fleet.url, model, run, seed, STEPS, STALENESS, tmp_path / "report.json"]
    done = subprocess.run(
        [str(TRAINERS_PYTHON), str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    failed = {call: count for call, count in report["calls"].items() if not call.endswith(" 200")}
    assert not failed
    digests, answers = report["digests"], report["answers"]
    assert len(set(digests.values())) == STEPS + 1
    assert len(answers) > 8 * STEPS
    assert [answer for answer in answers if digests[answer[0]] != answer[1]] == []
    own, following = report["ratios"]["own"], report["ratios"]["next"]
    assert own["max"] < 1e-3
    assert own["p99"] < 1e-4
    assert following["p99"] > 30 * own["p99"], "another version would have been noticed"
    logs = report["logs"]
    assert logs[0]["kl"] < 1e-6, "nothing was learnt before the first step"
    assert statistics.median(step["ratio"] for step in logs) == pytest.approx(1, abs=0.02)
    fifth = STEPS // 5
    rewards = [step["reward"] for step in logs]
    assert statistics.mean(rewards[-fifth:]) > statistics.mean(rewards[:fifth])
