"""A server for load tests with configured answers, on a real socket."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from loraplex.launcher.__main__ import main

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


REQUESTS = 6

Say = Callable[[int, Asked], bytes]


class Server(socketserver.ThreadingTCPServer):
    """Says what `say` gives for each POST, by number, and closes. models: what it lists."""

    daemon_threads = True
    say: Say
    models: bytes = b'{"data": [{"id": "sql", "parent": "llama"}, {"id": "llama", "parent": null}]}'

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Asked] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Handler(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        method, path, _ = self.rfile.readline().decode().split()
        headers: dict[str, str] = {}
        while line := self.rfile.readline().decode().strip():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = self.rfile.read(int(headers.get("content-length", 0)))
        is_json = "json" in headers.get("content-type", "")
        asked = Asked(method, path, headers, json.loads(body) if is_json else None)
        with self.server.lock:
            number = sum(earlier.method == "POST" for earlier in self.server.asked)
            self.server.asked.append(asked)
        if asked.method == "GET":
            self.wfile.write(whole(200, self.server.models))
        else:
            self.wfile.write(self.server.say(number, asked))


def whole(status: int, body: bytes, more: str = "") -> bytes:
    """Says that the connection ends with it: a client would else try to send more on it."""
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return f"{head}{more}\r\n".encode() + body


def unbounded(body: bytes, status: int = 200) -> bytes:
    """Its end is the connection's."""
    return f"HTTP/1.0 {status} X\r\ncontent-type: text/event-stream\r\n\r\n".encode() + body


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": counts})


def texts(*words: str, **last: Any) -> bytes:
    events = [event({"choices": [{"text": word}]}) for word in words[:-1]]
    return b"".join(events) + event({"choices": [{"text": words[-1], **last}]})


GOOD = texts("a", "b", "c", finish_reason="length") + usage(7, 3) + DONE


def serve(
    server: Server, capfd: pytest.CaptureFixture[str], say: Say | bytes, *options: str
) -> dict[str, Any]:
    """A summary of six requests for three tokens each. The exit code says whether some failed."""
    code, out, _ = _load(server, capfd, say, options)
    (line,) = out.splitlines()
    summary: dict[str, Any] = json.loads(line)
    assert code == (1 if summary["failed"] else 0)
    return summary


def failure(
    server: Server, capfd: pytest.CaptureFixture[str], say: Say | bytes, *options: str
) -> str:
    code, out, told = _load(server, capfd, say, options)
    assert (code, out) == (1, "")
    assert len(told.splitlines()) == 1
    return told


def _load(
    server: Server, capfd: pytest.CaptureFixture[str], say: Say | bytes, options: Sequence[str]
) -> tuple[object, str, str]:
    """The exit code, and what the command says."""
    server.say = (lambda number, asked: say) if isinstance(say, bytes) else say
    words = ("--url", server.url, "--requests", str(REQUESTS), "--prompt", "5", "--output", "3")
    code: object = 0
    try:
        main(["bench", "serve", *words, "--concurrency", "2", *options, "--json"])
    except SystemExit as left:
        code = left.code
    return code, *capfd.readouterr()
