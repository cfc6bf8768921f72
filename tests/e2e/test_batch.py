"""`loraplex batch` against a served demo: killed twice, and every line is answered once."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from loraplex.router.lines.lines import BatchRequest, read_line
from tests.e2e.serving import ROOT, Serving
from tests.launcher.batch.batch_files import line, numbers, records, write
from tests.tethered import tethered

TIMEOUT_S = 240.0
ADAPTERS = sorted(adapter_paths())
LINES = 144
KILLS = (40, 40)
CONCURRENCY = 8


class Recorder(ThreadingHTTPServer):
    """Hands requests on to the server and notes their adapters. It answers so many and no more
    until `open`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.http = httpx.Client(base_url=target, timeout=TIMEOUT_S)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.adapters: list[str] = []
        self.lock = threading.Lock()
        self.limit = LINES
        self.gate = threading.Event()

    def hold_after(self, count: int) -> None:
        with self.lock:
            self.limit = len(self.adapters) + count
            self.gate = threading.Event()

    def open(self) -> None:
        self.gate.set()

    def note(self, adapter: str) -> None:
        """Returns when the request may go on."""
        with self.lock:
            self.adapters.append(adapter)
            gate = self.gate if len(self.adapters) > self.limit else None
        if gate is not None:
            assert gate.wait(TIMEOUT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of clients that were killed."""


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        said = read_line(line("x", self.path, json.loads(body)))
        assert isinstance(said, BatchRequest)
        self.server.note(said.adapter)
        self._reply(self.server.http.post(self.path, content=body))

    def do_GET(self) -> None:
        self._reply(self.server.http.get(self.path))

    def _reply(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.send_header("content-length", str(len(answer.content)))
        self.send_header("x-request-id", answer.headers["x-request-id"])
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def recorder(serving: Serving) -> Iterator[Recorder]:
    with Recorder(serving.url) as recorder, recorder.http:
        thread = threading.Thread(target=recorder.serve_forever, args=(0.01,))
        thread.start()
        yield recorder
        recorder.open()
        recorder.shutdown()
        thread.join()


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


def answers(*paths: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


def test_killed_twice_and_every_line_is_answered_once(recorder: Recorder, tmp_path: Path) -> None:
    lines = [*requests(), *REFUSED, b"", *BAD]
    source = write(tmp_path / "in.jsonl", lines)
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    words = ["batch", str(source), "--out", str(out), "--errors", str(errors)]
    words += ["--url", recorder.url, "--concurrency", str(CONCURRENCY), "--adapters-at-once", "1"]

    def start() -> subprocess.Popen[bytes]:
        command = tethered(sys.executable, "-m", "loraplex", *words)
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stderr=log)

    def kill_after(count: int) -> int:
        """What was in flight at an earlier kill may be among the requests that are let through."""
        recorder.hold_after(count)
        least = answers(out, errors) + count - CONCURRENCY
        process = start()
        until(lambda: answers(out, errors) >= least, process)
        process.kill()
        process.wait()
        recorder.open()
        answered = answers(out, errors)
        out.write_bytes(out.read_bytes() + b'{"id":"batch_req_1_')
        return answered

    kills = [kill_after(count) for count in KILLS]
    done = start()
    assert done.wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()

    check_answers(lines, out, errors)
    said = (tmp_path / "log").read_text()
    for answered in kills:
        assert f"; {answered} have an answer already and are skipped\n" in said
    groups = {one.adapter for one in map(read_line, lines) if isinstance(one, BatchRequest)}
    switches = sum(one != other for one, other in pairwise(recorder.adapters))
    # Each run begins with the adapter that the one before it has left.
    assert switches <= len(groups) + len(KILLS)


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
