"""Streams and orders before servers that answer in every way, on real sockets."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.load_server import Server, event, serving, unbounded, whole
from tools.bench.__main__ import main


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_a_host_that_cannot_be(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["streams", "--window", "w", "--url", "http://."])
    told = capfd.readouterr().err
    assert left.value.code == 1
    assert told.endswith("'.' is no name of a host\n")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (whole(404, b'{"error": "no model"}'), "ended at once (status 404): no model"),
        (unbounded(event({"error": "lost"})), "ended at once (status 200): lost"),
    ],
)
def test_steady_streams_that_are_none(
    server: Server, capfd: pytest.CaptureFixture[str], answer: bytes, words: str
) -> None:
    server.say = lambda number, asked: answer
    with pytest.raises(SystemExit) as left:
        main(["streams", "--url", server.url, "--window", "w", "--streams", "2"])
    told = capfd.readouterr().err
    assert left.value.code == 1
    assert told.startswith(f"loraplex: 2 of 2 steady streams {words}")
    assert len(told.splitlines()) == 1


def test_orders_show_the_operators_key(
    server: Server,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_KEY", "operator")
    monkeypatch.setenv("LORAPLEX_API_KEY", "caller")
    for name in ("one", "t wo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").touch()
    server.say = lambda number, _: whole(401, b'{"error": {"message": "no"}}')
    words = ["adapters", "load", "--url", server.url, "--adapters-in", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 1
    assert capfd.readouterr().err == "loraplex: none of 2 adapters: load failed: 401: no\n"
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer operator"}
    assert {asked.path for asked in server.asked} == {
        "/v1/adapters/one/load",
        "/v1/adapters/t%20wo/load",
    }
    server.say = lambda number, asked: whole(
        200 if "one" in asked.path else 404, b'{"detail": "?"}'
    )
    with pytest.raises(SystemExit) as left:
        main([*words, "--json"])
    out, told = capfd.readouterr()
    orders = json.loads(out)
    assert (left.value.code, told) == (1, "loraplex: load failed for 1 of 2 adapters\n")
    assert (orders["done"], orders["failed"], orders["errors"]) == (1, 1, {"t wo": "404: ?"})
