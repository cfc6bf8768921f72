"""`loraplex batch` against a served demo: killed twice, and every line is answered once."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.serving import ROOT, Serving
from tests.launcher.batch.batch_files import line, numbers, records, write
from tests.tethered import tethered

TIMEOUT_S = 240.0
ADAPTERS = sorted(adapter_paths())
LINES = 144


def request(number: int, adapter: str, text: str) -> bytes:
    chat = [{"role": "user", "content": text}]
    lorax: dict[str, Any] = {"max_new_tokens": 4, **({"adapter_id": adapter} if adapter else {})}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": adapter, "messages": chat, "max_tokens": 4}),
        ("/v1/completions", {"model": adapter, "prompt": text, "max_tokens": 4}),
        ("/generate", {"inputs": text, "parameters": lorax}),
        ("/v1/responses", {"model": adapter, "input": text, "max_output_tokens": 4}),
        ("/", {"inputs": text, "parameters": lorax}),
        ("/tokenize", {"model": adapter, "prompt": text}),
    ]
    return line(f"line {number}", *bodies[number % len(bodies)])


def requests() -> list[bytes]:
    """Routes take turns, adapters and texts are drawn."""
    drawn, names = random.Random(3), ["", *ADAPTERS]
    return [request(number, drawn.choice(names), drawn.choice(EXAMPLES)) for number in range(LINES)]


BAD: dict[bytes, str] = {
    b"nonsense": "invalid_json",
    line("line 7", "/generate", {"inputs": "x"}): "duplicate_custom_id",
    line(None, "/generate", {"inputs": "x"}): "missing_custom_id",
    line("get", "/generate", {"inputs": "x"}, method="GET"): "invalid_method",
    line("where", "/nowhere", {"inputs": "x"}): "invalid_url",
    line("flow", "/v1/completions", {"model": "", "prompt": "x", "stream": True}): (
        "stream_not_supported"
    ),
}
REFUSED = {
    line("no adapter", "/v1/completions", {"model": "nobody", "prompt": "x"}): (403, 404),
    line("bad value", "/generate", {"inputs": "x", "parameters": {"top_p": 7}}): (422,),
}


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Polls a condition, bounded in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.02)


def test_killed_twice_and_every_line_is_answered_once(serving: Serving, tmp_path: Path) -> None:
    lines = [*requests(), *REFUSED, b"", *BAD]
    source = write(tmp_path / "in.jsonl", lines)
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    running = tmp_path / "out.jsonl.work" / "running"
    words = ["batch", str(source), "--out", str(out), "--errors", str(errors)]
    words += ["--url", serving.url]

    def start() -> subprocess.Popen[bytes]:
        command = tethered(sys.executable, "-m", "loraplex", *words)
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stderr=log)

    def kill_at(condition: Callable[[], bool]) -> None:
        process = start()
        until(condition, process)
        process.kill()
        process.wait()
        out.write_bytes(out.read_bytes() + b'{"id":"batch_req_1_')

    kill_at(running.exists)
    first = running.read_bytes()
    kill_at(lambda: running.exists() and running.read_bytes() != first)
    done = start()
    assert done.wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    check_answers(lines, out, errors)
    assert not running.parent.exists()


def check_answers(lines: list[bytes], out: Path, errors: Path) -> None:
    there = [number for number, text in enumerate(lines, 1) if text]
    assert numbers(out, errors) == there
    for record in records(out):
        number = int(record["id"].split("_")[2])
        asked = json.loads(lines[number - 1])
        assert record["custom_id"] == asked["custom_id"]
        assert record["response"]["status_code"] == 200
        assert record["response"]["request_id"]
        assert record["error"] is None
        if asked["url"].endswith("completions") and asked["body"]["model"]:
            assert record["response"]["body"]["model"] == asked["body"]["model"]
    for record in records(errors):
        text = lines[int(record["id"].split("_")[2]) - 1]
        if text in BAD:
            assert (record["error"]["code"], record["response"]) == (BAD[text], None)
        else:
            assert record["response"]["status_code"] in REFUSED[text]
            assert record["response"]["body"]["error"]
