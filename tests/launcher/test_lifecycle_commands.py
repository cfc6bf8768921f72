"""The lifecycle commands' words to a router, and what they make of its answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loraplex.launcher.__main__ import main

ADAPTER = {
    "id": "one", "object": "adapter", "state": "ready", "pinned": True, "digest": "d" * 64,
    "ranks": [4, 8], "nbytes": 12345, "resident_on": ["w1"], "ref": "hub:org/one", "error": None,
}  # fmt: skip


class StubRouter(ThreadingHTTPServer):
    """Gives configured answers, and remembers its requests."""

    answer: tuple[int, Any] = (200, ADAPTER)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, Any, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StubRouter

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        asked = (self.command, self.path, body, self.headers.get("authorization"))
        self.server.asked.append(asked)
        status, answer = self.server.answer
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_PATCH = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubRouter]:
    monkeypatch.setenv("LORAPLEX_ADMIN_KEY", "from the environment")
    with StubRouter() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def command(stub: StubRouter, *arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["adapter", *arguments, "--url", stub.url])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["list"], [("GET", "/v1/adapters", None)]),
        (["list", "one"], [("GET", "/v1/adapters/one", None)]),
        (
            ["register", "one", "org/one", "--pin"],
            [
                (
                    *("POST", "/v1/adapters"),
                    {
                        "name": "one",
                        "ref": "org/one",
                        "pin": True,
                        "replace": False,
                        "token": None,
                        "tenant": None,
                    },
                )
            ],
        ),
        (
            ["register", "one", "org/one", "--replace", "--tool-format", "hermes"],
            [
                (
                    *("POST", "/v1/adapters"),
                    {
                        "name": "one",
                        "ref": "org/one",
                        "replace": True,
                        "token": None,
                        "tenant": None,
                        "tool_format": "hermes",
                    },
                )
            ],
        ),
        (
            ["load", "one", "a/b"],
            [("POST", "/v1/adapters/one/load", None), ("POST", "/v1/adapters/a%2Fb/load", None)],
        ),
        (["unpin", "one"], [("POST", "/v1/adapters/one/unpin", None)]),
        (["unload", "one"], [("POST", "/v1/adapters/one/unload", None)]),
        (["list", "--tenant", "acme"], [("GET", "/v1/adapters?tenant=acme", None)]),
        (["list", "one", "--tenant", ""], [("GET", "/v1/adapters/one?tenant=", None)]),
        (
            ["pin", "one", "two", "--tenant", "a&b"],
            [
                ("POST", "/v1/adapters/one/pin?tenant=a%26b", None),
                ("POST", "/v1/adapters/two/pin?tenant=a%26b", None),
            ],
        ),
    ],
)
def test_what_is_asked(
    stub: StubRouter, arguments: list[str], asked: list[tuple[str, str, Any]], capsys: Any
) -> None:
    is_list = arguments[0] == "list" and "one" not in arguments
    if is_list:
        stub.answer = (200, {"object": "list", "data": [ADAPTER], "file_errors": ["x: bad"]})
    assert command(stub, *arguments) == 0
    assert [told[:3] for told in stub.asked] == asked
    assert {told[3] for told in stub.asked} == {"Bearer from the environment"}
    printed = capsys.readouterr().out
    assert "one   -       ready  yes" in printed
    assert "dddddddddddd  4,8" in printed
    assert ("x: bad" in printed) == is_list


VERSIONS = [{"reference": "org/one@v2", "weight": 5}]
ROLLOUT: dict[str, Any] = {
    "id": "r", "guards": None,
    "versions": [
        {"reference": "hub:org/one", "digest": "d" * 64, "weight": 95, "live_weight": 100,
         "state": "serving", "why": None, "resident_on": []},
        {"reference": "hub:org/one@v2", "digest": "e" * 64, "weight": 5, "live_weight": 0,
         "state": "warming", "why": None, "resident_on": []},
    ],
    "measured": [{"digest": "d" * 64, "requests": 70, "failed": 1, "first_token_p95_s": 0.1234,
                  "token_p95_s": None}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["one", "org/one@v2=5"], ("POST", "rollout", {"versions": VERSIONS})),
        (
            ["one", "org/one@v2=5", "--max-latency-ratio", "3", "--min-requests", "9"],
            (
                *("POST", "rollout"),
                {"versions": VERSIONS, "guards": {"max_latency_ratio": 3.0, "min_requests": 9}},
            ),
        ),
        (
            ["one", "org/one@v2=5", "--no-guards"],
            ("POST", "rollout", {"versions": VERSIONS, "guards": None}),
        ),
        (["one", "--end"], ("DELETE", "rollout", None)),
    ],
)
def test_rollouts_are_set(
    stub: StubRouter, arguments: list[str], asked: tuple[str, str, Any], capsys: Any
) -> None:
    stub.answer = (200, {**ADAPTER, "rollout": {**ROLLOUT, "measured": None}})
    assert command(stub, "rollout", *arguments) == 0
    method, action, body = asked
    assert [told[:3] for told in stub.asked] == [(method, f"/v1/adapters/one/{action}", body)]
    printed = capsys.readouterr().out
    assert "one   -       ready  yes" in printed
    assert "eeeeeeeeeeee hub:org/one@v2  5       0     warming" in printed


@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_promoted_and_taken_back(stub: StubRouter, action: str) -> None:
    assert command(stub, action, "one") == 0
    assert command(stub, action, "one", "--digest", "e" * 8) == 0
    path = f"/v1/adapters/one/{action}"
    asked = [told[:3] for told in stub.asked]
    assert asked == [("POST", path, {}), ("POST", path, {"digest": "e" * 8})]


def test_rollouts_and_history_are_reported(stub: StubRouter, capsys: Any) -> None:
    stub.answer = (200, ROLLOUT)
    assert command(stub, "rollout", "one") == 0
    assert stub.asked[0][:2] == ("GET", "/v1/adapters/one/rollout")
    first = capsys.readouterr().out.splitlines()[1]
    assert first.split() == [
        *("dddddddddddd", "hub:org/one", "95", "100", "serving", "70", "1", "0.123", "s", "-"),
    ]
    stub.answer = (200, {**ROLLOUT, "measured_by": "this_router"})
    assert command(stub, "rollout", "one") == 0
    assert "there is no Redis" in capsys.readouterr().out
    change = {"digest": "e" * 64, "since": 0, "action": "promote", "by": "api 10.0.0.1",
              "ref": "hub:org/one@abc", "before": "d" * 64, "note": ""}  # fmt: skip
    stub.answer = (200, {"id": "one", "data": [change], "object": "list"})
    assert command(stub, "history", "one") == 0
    told = capsys.readouterr().out.splitlines()[1]
    assert told.startswith(
        "1970-01-01T00:00:00Z  promote  api 10.0.0.1  eeeeeeeeeeee  dddddddddddd"
    )


@pytest.mark.parametrize("version", ["org/one", "org/one@v2=", "=5", "org/one=five"])
def test_a_version_wants_a_weight(version: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(["adapter", "rollout", "one", version])
    assert left.value.code == 2
    assert "REF=WEIGHT" in capsys.readouterr().err


def test_the_key_file_wins_and_the_token_is_read(stub: StubRouter, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from the file\n")
    (tmp_path / "token").write_text("hf_secret\n")
    files = ["--admin-key-file", str(tmp_path / "key"), "--token-file", str(tmp_path / "token")]
    assert command(stub, "register", "one", "org/one", *files) == 0
    _, _, body, authorization = stub.asked[0]
    assert authorization == "Bearer from the file"
    assert body["token"] == "hf_secret"


def test_refresh_and_delete_in_words(stub: StubRouter, capsys: Any) -> None:
    change = {"old_digest": "a" * 64, "new_digest": "b" * 64, "changed": True, "adapter": ADAPTER}
    stub.answer = (200, change)
    assert command(stub, "refresh", "one") == 0
    assert capsys.readouterr().out == "one changed: aaaaaaaaaaaa -> bbbbbbbbbbbb\n"
    stub.answer = (200, {"id": "one", "deleted": True, "object": "adapter"})
    assert command(stub, "delete", "one") == 0
    assert capsys.readouterr().out == "one deleted\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((409, {"error": {"message": "it is unloaded"}}), "it is unloaded"),
        ((500, {}), "answered 500"),
        ((200, b"<html>"), "not in JSON"),
    ],
)
def test_failures(stub: StubRouter, answer: tuple[int, Any], words: str, capsys: Any) -> None:
    stub.answer = answer
    assert command(stub, "load", "one") == 1
    assert words in capsys.readouterr().err


def test_nobody_answers(stub: StubRouter, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(["adapter", "list", "--url", "http://127.0.0.1:1"])
    assert left.value.code == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_whose_name_it_is_is_asked_and_shown(stub: StubRouter, capsys: Any) -> None:
    acme = {**ADAPTER, "tenant": "acme", "error": "odd", "rollout": {**ROLLOUT, "measured": None}}
    stub.answer = (200, acme)
    assert command(stub, "register", "one", "org/one", "--tenant", "acme") == 0
    assert stub.asked[-1][2]["tenant"] == "acme"
    printed = capsys.readouterr().out
    assert "one   acme    ready  yes" in printed
    assert "acme::one: odd" in printed
    assert "acme::one: VERSION" in printed
    assert command(stub, "rollout", "one", "org/one@v2=5", "--tenant", "acme") == 0
    assert stub.asked[-1][:2] == ("POST", "/v1/adapters/one/rollout?tenant=acme")
    assert command(stub, "history", "one", "--tenant", "acme", "--json") == 0
    assert stub.asked[-1][:2] == ("GET", "/v1/adapters/one/history?tenant=acme")
    stub.answer = (200, {"id": "one", "tenant": "acme", "deleted": True, "object": "adapter"})
    capsys.readouterr()
    assert command(stub, "delete", "one", "--tenant", "acme") == 0
    assert stub.asked[-1][:2] == ("DELETE", "/v1/adapters/one?tenant=acme")
    assert capsys.readouterr().out == "acme::one deleted\n"
