"""`loraplex eval` against a served demo: its table is the one that plain requests give."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.launcher.demo import EXAMPLES
from tests.e2e.serving import ROOT, Serving
from tests.e2e.test_batch import TIMEOUT_S, until
from tests.tethered import tethered
from tools.demo import tasks
from tools.demo.corpus import held_out_messages

NAMES = ["sentiment", "router", "json"]
MAX_TOKENS = 8
MOODS = ["positive", "neutral", "negative"]


def lines_of(count: int) -> list[dict[str, Any]]:
    """Texts and chats in turn, which are two batches."""
    lines: list[dict[str, Any]] = []
    for number, message in enumerate(held_out_messages(3, count)):
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": message.text}]}
        asked = chat if number % 2 else {"prompt": message.text}
        lines.append({**asked, "answer": tasks.as_sentiment(message.facts)})
    return lines


def command(folder: Path, lines: list[dict[str, Any]], score: str, url: str) -> list[str]:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["eval", *NAMES, "--data", str(data), "--score", score, "--out", str(folder / "out")]
    words += ["--max-tokens", str(MAX_TOKENS), "--json", "--url", url]
    return tethered(sys.executable, "-m", "loraplex", *words)


def report(folder: Path, lines: list[dict[str, Any]], score: str, url: str) -> dict[str, Any]:
    words = command(folder, lines, score, url)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said == json.loads((folder / "out" / "report.json").read_text())
    return said


def text_of(http: httpx.Client, model: str, line: dict[str, Any]) -> str:
    asked: dict[str, Any] = {name: line[name] for name in ("prompt", "messages") if name in line}
    route = "chat/completions" if "messages" in line else "completions"
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS, **asked}
    (choice,) = http.post(f"/v1/{route}", json=body).raise_for_status().json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def by_hand(http: httpx.Client, lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {
        name: [float(text_of(http, name, line).strip() == line["answer"]) for line in lines]
        for name in NAMES
    }


def check(said: dict[str, Any], expected: dict[str, list[float]]) -> None:
    assert {row["adapter"]: row["scores"] for row in said["adapters"]} == expected
    assert sum(expected["sentiment"]) > sum(expected["json"]), "the lines must tell them apart"
    for row in said["adapters"]:
        mean = sum(expected[row["adapter"]]) / said["lines"]
        assert (row["score"], row["failed"]) == (mean, 0)
        assert row["low"] <= mean <= row["high"]
    for pair in said["pairs"]:
        both = list(zip(expected[pair["first"]], expected[pair["second"]], strict=True))
        assert pair["wins"] == sum(a > b for a, b in both)
        assert pair["losses"] == sum(a < b for a, b in both)


def test_scores_are_those_of_plain_requests(
    serving: Serving, http: httpx.Client, tmp_path: Path
) -> None:
    lines = lines_of(12)
    check(report(tmp_path, lines, "exact", serving.url), by_hand(http, lines))


def likeliest(http: httpx.Client, model: str, prompt: str) -> int:
    """By the tokens of the text beyond the prompt, in an echo."""
    sums = []
    for mood in MOODS:
        body = {"model": model, "prompt": prompt + mood, "echo": True, "max_tokens": 0}
        answer = http.post("/v1/completions", json=body | {"logprobs": 0}).raise_for_status()
        told = answer.json()["choices"][0]["logprobs"]
        ends = [*told["text_offset"][1:], len(prompt + mood)]
        pairs = zip(told["token_logprobs"], ends, strict=True)
        sums.append(sum(logprob for logprob, end in pairs if end > len(prompt)))
    return sums.index(max(sums))


def test_choices_are_those_of_echoed_prompts(
    serving: Serving, http: httpx.Client, tmp_path: Path
) -> None:
    lines = [{"prompt": text, "choices": MOODS, "answer": 1} for text in EXAMPLES]
    chat = {"messages": [{"role": "user", "content": EXAMPLES[1]}], "choices": MOODS}
    said = report(tmp_path, [*lines, {**chat, "answer": "negative"}], "choice", serving.url)
    for row in said["adapters"]:
        right = [float(likeliest(http, row["adapter"], text) == 1) for text in EXAMPLES]
        assert row["scores"][:-1] == right
    assert said["adapters"][0]["scores"][-1] == 1


@pytest.mark.exhaustive
def test_killed_twice_and_the_table_is_the_same(
    serving: Serving, http: httpx.Client, tmp_path: Path
) -> None:
    lines = lines_of(48)
    running = tmp_path / "out" / "answers.jsonl.work" / "running"
    words = command(tmp_path, lines, "exact", serving.url)

    def killed_at(before: bytes) -> bytes:
        """Kills the command when it follows another batch, whose id is returned."""
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        until(lambda: running.exists() and running.read_bytes() not in (b"", before), process)
        process.kill()
        process.wait()
        return running.read_bytes()

    killed_at(killed_at(b""))
    check(report(tmp_path, lines, "exact", serving.url), by_hand(http, lines))
    marks = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert len(marks) == len(NAMES) * len(lines)


@pytest.mark.exhaustive
def test_a_judge_gives_points(serving: Serving, tmp_path: Path) -> None:
    said = report(tmp_path, lines_of(3), "judge:pirate", serving.url)
    for row in said["adapters"]:
        assert {score * 10 for score in row["scores"]} <= set(range(11))
    again = report(tmp_path, lines_of(3), "judge:pirate", serving.url)
    assert again == said
