"""`loraplex parity`: the served demo has PEFT's log-probabilities, and a difference is found."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from loraplex.launcher.demo import EXAMPLES, adapter_paths, model_path
from loraplex.launcher.evaluation.questions import LineAnswer, questions, read_answers
from loraplex.launcher.evaluation.scores import EvalLine
from loraplex.launcher.parity.command import Spread, _differences, spreads
from tests.e2e.serving import ROOT, Serving
from tests.tethered import tethered

pytestmark = pytest.mark.filterwarnings("ignore")
ADAPTER = "json"
TOLERANCE = 1e-4
TIMEOUT_S = 240.0
LINES = [
    EvalLine(prompt=EXAMPLES[0]),
    EvalLine(messages=[{"role": "user", "content": EXAMPLES[2]}]),
]


def served(http: httpx.Client, folder: Path) -> list[LineAnswer]:
    """Answers as a batch's file has them."""
    records = []
    for asked in questions("logprobs", [ADAPTER], LINES, 8):
        body = http.post(asked.url, json=asked.body).raise_for_status().json()
        response = {"status_code": 200, "request_id": None, "body": body}
        record = {"id": "x", "custom_id": asked.custom_id, "response": response, "error": None}
        records.append(json.dumps(record))
    (folder / "answers").write_text("\n".join(records))
    return list(read_answers(folder / "answers").values())


def compared(answers: list[LineAnswer], adapter: str) -> dict[str, Spread]:
    arguments = argparse.Namespace(
        model=model_path(),
        revision=None,
        device="cpu",
        peft_dtype="float32",
    )
    found = list(_differences(arguments, adapter_paths()[adapter], answers))
    return {one.tokens_at: one for one in spreads(found)}


def test_tokens_have_the_log_probabilities_of_peft(
    serving: Serving, http: httpx.Client, tmp_path: Path
) -> None:
    text, chat = answers = served(http, tmp_path)
    found = compared(answers, ADAPTER)
    assert found["all"].max < TOLERANCE
    assert found["answer"].tokens == len(text.output_ids) + len(chat.output_ids) == 16
    assert found["prompt"].tokens == len(text.prompt_ids) + len(chat.prompt_ids) - 2
    wrong = (*text.output_logprobs[:-1], text.output_logprobs[-1] + 0.5)
    moved = compared([msgspec.structs.replace(text, output_logprobs=wrong), chat], ADAPTER)
    assert moved["answer"].max == pytest.approx(0.5, abs=TOLERANCE)
    assert moved["prompt"].max < TOLERANCE
    assert compared(answers, "pirate")["all"].max > 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "code"), [("float32", 0), ("bfloat16", 1)])
def test_the_command_keeps_its_bound(tmp_path: Path, dtype: str, code: int) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in EXAMPLES))
    adapters = [str(adapter_paths()[name]) for name in (ADAPTER, "sql")]
    words = ["parity", str(model_path()), *adapters, "--prompts", str(data)]
    words += ["--peft-dtype", dtype, "--bound", "0.001", "--json", "--device", "cpu"]
    words += ["--kv-memory", "64MiB", "--cache-dir", str(tmp_path / "cache")]
    command = tethered(sys.executable, "-m", "loraplex", *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == code, done.stderr
    rows = json.loads(done.stdout)
    assert (rows[0]["tokens_at"], rows[0]["max"] > 0.001) == ("all", bool(code))
    counts = {row["tokens_at"]: row["tokens"] for row in rows}
    assert counts["family llama"] == counts["rank 16"] + counts["rank 32"] == counts["all"]
