"""`loraplex bench` before servers that answer in every way, on real sockets."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraplex.launcher.__main__ import main
from tests.launcher.load_server import (
    DONE,
    GOOD,
    REQUESTS,
    Server,
    event,
    failure,
    serve,
    serving,
    texts,
    unbounded,
    usage,
    whole,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.mark.parametrize(
    "stream",
    [
        GOOD,
        GOOD.replace(b"\n", b"\r\n"),
        GOOD.replace(b"\n", b"\r"),
        GOOD.replace(b"data:", b"event: token\ndata:"),
        GOOD.replace(b"data:", b": keep-alive\ndata:"),
        GOOD.replace(b"data: ", b"data:"),
        b": keep-alive\n\n" + GOOD,
        b"\xef\xbb\xbf" + GOOD,
    ],
)
@pytest.mark.parametrize("answered", [unbounded, lambda body: whole(200, body)])
def test_valid_streams_are_complete(
    server: Server,
    capfd: pytest.CaptureFixture[str],
    stream: bytes,
    answered: Callable[[bytes], bytes],
) -> None:
    summary = serve(server, capfd, answered(stream))
    assert (summary["completed"], summary["errors"]) == (REQUESTS, {})
    assert (summary["short"], summary["counted_by_events"]) == (0, 0)
    assert summary["all"]["requests"] == REQUESTS


def test_chunks_and_a_lost_end(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    """A chunked answer ends with its last chunk, or with what the server says is the end."""
    head = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, GOOD[i : i + 1]) for i in range(len(GOOD)))
    for end in (b"0\r\n\r\n", b""):
        assert serve(server, capfd, head + chunks + end)["completed"] == REQUESTS


@pytest.mark.parametrize(
    "answer",
    [
        unbounded(GOOD.removesuffix(DONE)),
        whole(200, GOOD.removesuffix(DONE), "x: y\r\n").replace(b"length: ", b"length: 9"),
        b"HTTP/1.1 200 X\r\n",
        b"",
    ],
)
def test_closed_before_the_end(
    server: Server, capfd: pytest.CaptureFixture[str], answer: bytes
) -> None:
    told = failure(server, capfd, answer)
    assert told.endswith("answered: ConnectionResetError closed before the answer ended\n")


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (unbounded(b"data: hello\n\n" + GOOD), "malformed event", "hello ("),
        (unbounded(b"data: [1,2]\n\n" + GOOD), "malformed event", "[1,2] ("),
        (unbounded(texts("a") + event({"error": {"message": "lost"}})), "error event", "lost"),
        (whole(200, b'{"choices": []}'), "no tokens", '{"choices": []}'),
        (whole(200, b""), "no tokens", ""),
        (b"SSH-2.0-x\r\n", "HttpParser", ""),
        (whole(500, b'{"error": "broken"}'), "500", "broken"),
        (unbounded(b'{"error": {"message": "broken"}}', 502), "502", "broken"),
        (
            whole(503, b"full", "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n"),
            "503",
            "full",
        ),
        (whole(429, b'{"message": "slow"}', "Retry-After: soon\r\n"), "429", "slow"),
    ],
)
def test_one_bad_answer_is_one_failed_request(
    server: Server, capfd: pytest.CaptureFixture[str], bad: bytes, kind: str, words: str
) -> None:
    summary = serve(server, capfd, lambda number, _: bad if number == 2 else unbounded(GOOD))
    assert (summary["completed"], summary["failed"]) == (REQUESTS - 1, 1)
    ((told, count),) = summary["errors"].items()
    assert count == 1
    assert told.startswith(kind)
    assert summary["first_errors"][told].startswith(words)


@pytest.mark.parametrize("processes", [(), ("--processes", "2")])
def test_a_server_that_refuses_all(
    server: Server, capfd: pytest.CaptureFixture[str], processes: tuple[str, ...]
) -> None:
    answer = whole(404, b'{"error": {"message": "no model `x`", "code": "y"}}')
    told = failure(server, capfd, answer, *processes)
    assert told == f"loraplex: none of {REQUESTS} requests was answered: 404 no model `x`\n"


def test_a_server_that_is_down(capfd: pytest.CaptureFixture[str]) -> None:
    with Server() as gone:
        pass
    told = failure(gone, capfd, b"")
    assert told.startswith(f"loraplex: none of {REQUESTS} requests was answered: ConnectionRefused")


def test_a_host_that_cannot_be(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "--requests", "2", "--url", "http://."])
    told = capfd.readouterr().err
    assert left.value.code == 1
    assert told.endswith("'.' is no name of a host\n")
    assert len(told.splitlines()) == 1


def test_the_first_word_of_each_failure_is_shown(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    server.say = lambda number, _: whole(503, b"full") if number % 2 else unbounded(GOOD)
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "--url", server.url, "--requests", "4", "--concurrency", "1"])
    table, told = capfd.readouterr()
    assert (left.value.code, told) == (1, "loraplex: 2 of 4 requests failed\n")
    assert "2 requests in" in table
    assert "2 failed {'503': 2}\n  503: full\n" in table


# ---- what is sent


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("completions", "/v1/completions"),
        ("chat", "/v1/chat/completions"),
        ("lorax", "/generate_stream"),
    ],
)
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_where_requests_go(
    server: Server, capfd: pytest.CaptureFixture[str], api: str, path: str, suffix: str
) -> None:
    serve(server, capfd, unbounded(GOOD), "--url", server.url + suffix, "--api", api)
    posts = [asked for asked in server.asked if asked.method == "POST"]
    assert {asked.path for asked in posts} == {path}
    assert len(posts) == REQUESTS


def test_a_chat_of_lorax_and_of_openai(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    words = {"choices": [{"delta": {"content": "a b c"}, "finish_reason": "length"}]}
    chat = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) + event(words)
    summary = serve(server, capfd, unbounded(chat + usage(30, 3) + DONE), "--api", "chat")
    assert summary["completed"] == REQUESTS
    assert summary["prompt_tokens_per_s"] == pytest.approx(
        10 * summary["output_tokens_per_s"], 0.01
    )
    token = {"id": 1, "text": "a", "logprob": 0, "special": False}
    details = {"finish_reason": "length", "prompt_tokens": 30, "generated_tokens": 3}
    last = event({"token": token, "generated_text": "aaa", "details": details})
    summary = serve(server, capfd, unbounded(2 * event({"token": token}) + last), "--api", "lorax")
    assert (summary["completed"], summary["short"], summary["counted_by_events"]) == (
        REQUESTS,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("models", "options", "name"),
    [
        (Server.models, (), "llama"),
        (Server.models, ("--base-model", "mine"), "mine"),
        (b"[]", (), "base"),
        (b'{"data": []}', (), "base"),
        (b"no", (), "base"),
    ],
)
def test_what_the_base_is_called(
    server: Server,
    capfd: pytest.CaptureFixture[str],
    models: bytes,
    options: tuple[str, ...],
    name: str,
) -> None:
    server.models = models
    serve(server, capfd, unbounded(GOOD), *options)
    assert {asked.body["model"] for asked in server.asked if asked.body} == {name}


def test_keys_are_shown(
    server: Server,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_KEY", "operator")
    serve(server, capfd, unbounded(GOOD))
    assert not any("authorization" in asked.headers for asked in server.asked)
    server.asked.clear()
    monkeypatch.setenv("LORAPLEX_API_KEY", "caller")
    serve(server, capfd, unbounded(GOOD))
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer caller"}
    server.asked.clear()
    (tmp_path / "key").write_text("other\n")
    options = ("--api-key-file", str(tmp_path / "key"), "--processes", "2")
    serve(server, capfd, unbounded(GOOD), *options)
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer other"}


def test_a_secret_that_no_header_takes(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", "clé")
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "--url", server.url])
    assert left.value.code == 2
    assert capfd.readouterr().err == "loraplex: keys must be ASCII, as they are sent in a header\n"
    assert not server.asked
