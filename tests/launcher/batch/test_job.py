"""`loraplex batch` against a server with configured answers, on real sockets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from loraplex.launcher.__main__ import main
from tests.launcher.batch.batch_files import chat, line, numbers, records, write
from tests.launcher.load_server import Asked, Server, serving, whole
from tests.tethered import tethered

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240.0
GOOD = whole(200, b'{"ok": true}', "x-request-id: r1\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.say = lambda number, asked: GOOD
        yield server


class Batch:
    def __init__(self, folder: Path, url: str) -> None:
        self.input, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"
        self.url = url

    def words(self, *options: str) -> list[str]:
        files = [str(self.input), "--out", str(self.out), "--url", self.url]
        return ["batch", *files, *options]

    def run(self, *options: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(self.words(*options))
        assert isinstance(left.value.code, int)
        return left.value.code


@pytest.fixture
def batch(tmp_path: Path, server: Server) -> Batch:
    return Batch(tmp_path, server.url)


def until(condition: Callable[[], bool]) -> None:
    """Polls a condition, bounded in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def posts(server: Server) -> list[Asked]:
    return [asked for asked in server.asked if asked.method == "POST"]


def test_lines_go_out_adapter_by_adapter(
    server: Server,
    batch: Batch,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", "sk-1")
    write(batch.input, [chat(f"{i}", "abc"[i % 3]) for i in range(30)])
    assert batch.run("--concurrency", "1") == 0
    asked = posts(server)
    names = [one.body["model"] for one in asked]
    assert sum(one != other for one, other in pairwise(names)) == 2
    assert {one.headers["authorization"] for one in asked} == {"Bearer sk-1"}
    assert {one.path for one in asked} == {"/v1/chat/completions"}
    (first, *_) = records(batch.out)
    assert first["response"] == {"status_code": 200, "request_id": "r1", "body": {"ok": True}}
    assert (len(records(batch.out)), batch.errors.read_bytes()) == (30, b"")
    said = capsys.readouterr().err
    assert "30 lines, 3 adapters\n" in said
    assert "30 of 30 lines have an answer, 0 of them in the error file" in said
    assert batch.run() == 0
    assert "30 have an answer already and are skipped" in capsys.readouterr().err
    assert len(posts(server)) == 30
    assert batch.run("--restart") == 0
    assert len(posts(server)) == 60


def test_so_many_adapters_at_once(server: Server, batch: Batch) -> None:
    """The second adapter's first line waits for the first one's last answer."""
    write(batch.input, [chat(f"{i}", "ab"[i % 2]) for i in range(20)])
    now, most, lock = list[str](), set[str](), threading.Lock()

    def say(number: int, asked: Asked) -> bytes:
        with lock:
            now.append(asked.body["model"])
            most.add("".join(sorted({*now})))
        with lock:
            now.remove(asked.body["model"])
        return GOOD

    server.say = say
    assert batch.run("--concurrency", "8", "--adapters-at-once", "1") == 0
    assert most == {"a", "b"}


def test_failed_lines_are_answered_in_the_error_file(
    server: Server, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"error": {"message": "no such adapter", "code": "model_not_found"}}

    def say(number: int, asked: Asked) -> bytes:
        missing = asked.body.get("model") == "missing"
        return whole(404, json.dumps(fault).encode()) if missing else GOOD

    server.say = say
    write(batch.input, [chat("a"), b"nonsense", chat("b", "missing"), b"", chat("a")])
    assert batch.run() == 0
    assert numbers(batch.out) == [1]
    failed = {one["id"].split("_")[2]: one for one in records(batch.errors)}
    assert failed["3"]["response"]["body"] == fault
    assert (failed["3"]["response"]["status_code"], failed["3"]["error"]) == (404, None)
    assert failed["2"]["error"]["code"] == "invalid_json"
    assert failed["5"]["error"]["code"] == "duplicate_custom_id"
    said = capsys.readouterr().err
    assert "4 of 4 lines have an answer, 3 of them in the error file" in said
    assert "1 status 404" in said
    assert batch.run("--strict") == 1, "also of lines that failed in an earlier run"


@pytest.mark.parametrize(
    "refusal",
    [
        whole(429, b'{"error": "full"}', "retry-after: 0\r\n"),
        whole(503, b"", "retry-after: 0\r\n"),
        whole(504, b"", "retry-after: 0\r\n"),
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{",
    ],
)
def test_another_attempt(server: Server, batch: Batch, refusal: bytes) -> None:
    """Refused, or cut off."""
    server.say = lambda number, asked: refusal if number in (0, 2) else GOOD
    write(batch.input, [chat(f"{i}") for i in range(4)])
    assert batch.run("--concurrency", "1") == 0
    assert numbers(batch.out) == [1, 2, 3, 4]
    assert len(posts(server)) == 6


def test_a_line_that_fails_alone_is_given_up(server: Server, batch: Batch) -> None:
    """Others are answered meanwhile."""
    busy = b'{"error": {"code": "unavailable"}}'

    def say(number: int, asked: Asked) -> bytes:
        if asked.body["model"] == "sql":
            return GOOD
        until(lambda: batch.out.stat().st_size > 0)
        return whole(503, busy, "retry-after: 0\r\n")

    server.say = say
    write(batch.input, [chat("a", "broken"), chat("b")])
    assert batch.run("--retries", "3") == 0
    (failed,) = records(batch.errors)
    assert failed["response"]["status_code"] == 503
    assert failed["response"]["body"] == {"error": {"code": "unavailable"}}
    assert len(posts(server)) == 5


def test_a_server_that_answers_nobody_ends_the_batch(
    server: Server, batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = whole(503, b'{"error": "no worker is ready"}', "retry-after: 0\r\n")
    server.say = lambda number, asked: busy if number >= 2 else GOOD
    write(batch.input, [chat(f"{i}") for i in range(9)])
    assert batch.run("--concurrency", "1", "--retries", "2") == 1
    said = capsys.readouterr().err
    assert "answers nobody any more: 503 no worker is ready" in said
    assert "7 lines have no answer: the same command goes on with them" in said
    assert (numbers(batch.out), records(batch.errors)) == ([1, 2], [])
    server.say = lambda number, asked: GOOD
    assert batch.run() == 0
    assert numbers(batch.out) == [*range(1, 10)]


def test_no_server(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    write(batch.input, [chat("a")])
    batch.url = "http://127.0.0.1:1"
    assert batch.run() == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_an_answer_that_takes_too_long(server: Server, batch: Batch) -> None:
    """It is the line's own fault, even if it is the last."""
    over = threading.Event()

    def say(number: int, asked: Asked) -> bytes:
        over.wait(TIMEOUT_S)
        return GOOD

    server.say = say
    write(batch.input, [chat("a")])
    try:
        assert batch.run("--timeout-s", "0.2", "--retries", "1") == 0
    finally:
        over.set()
    (failed,) = records(batch.errors)
    assert (failed["error"]["code"], len(posts(server))) == ("timeout", 2)


def test_a_key_that_is_refused(
    server: Server,
    batch: Batch,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any line is sent."""
    refusal = whole(401, b'{"error": {"message": "no such key"}}')
    monkeypatch.setattr("tests.launcher.load_server.whole", lambda *words: refusal)
    write(batch.input, [chat("a")])
    assert batch.run() == 1
    assert "refuses the key: no such key" in capsys.readouterr().err
    assert (posts(server), records(batch.errors)) == ([], [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-memory", "1GB"], "--kv-memory is of a server that batch starts"),
        (["--model", "m"], "--model is of a server that batch starts"),
        (["--share-prefixes"], "--share-prefixes is of a server that batch starts"),
        (["--errors", "{out}"], "IN, --out and --errors must be three files"),
        (["--url", "ftp://x"], "expected http://host:port"),
        (["--concurrency", "0"], "expected a whole number"),
    ],
)
def test_misuse(
    batch: Batch, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(batch.input, [chat("a")])
    options = [option.format(out=batch.out) for option in options]
    assert batch.run(*options) == 2
    assert words in capsys.readouterr().err
    assert not batch.out.exists()


def started(batch: Batch, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tethered(sys.executable, "-m", "loraplex", *batch.words(*options)),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_stops_it(server: Server, batch: Batch, signals: int) -> None:
    """Once: what is in flight is answered. Twice: at once."""
    release = threading.Event()

    def say(number: int, asked: Asked) -> bytes:
        assert release.wait(TIMEOUT_S)
        return GOOD

    server.say = say
    write(batch.input, [chat("a"), chat("b"), chat("c"), line("d", "/generate", {})])
    process = started(batch, "--concurrency", "2")
    assert process.stdout is not None
    until(lambda: len(posts(server)) == 2)
    process.send_signal(signal.SIGINT)
    assert "stopping" in process.stdout.readline()
    if signals == 2:
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
    release.set()
    _, said = process.communicate(timeout=TIMEOUT_S)
    done = 2 if signals == 1 else 0
    assert process.returncode == (1 if signals == 1 else 130)
    assert f"{4 - done} lines have no answer: the same command goes on with them" in said
    assert "Traceback" not in said
    assert len(numbers(batch.out)) == done
    assert batch.run() == 0
    assert numbers(batch.out) == [1, 2, 3, 4]
