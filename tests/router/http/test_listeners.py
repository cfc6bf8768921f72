"""Ports that are shared, and ports that are not."""

import resource
import socket
from pathlib import Path

import pytest

from loraplex.router.http.listeners import (
    allow_connections,
    limit_unread,
    listen,
    listen_unix,
    share,
    url_of,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_shares_a_port_gets_nothing_before_it_listens(host: str) -> None:
    with share(host, 0) as held:
        address = held.getsockname()[:2]
        assert url_of(held).endswith(f":{address[1]}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 5)
        with share(*address) as serving:
            serving.listen()
            serving.settimeout(240)
            for _ in range(8):  # none of them waits at the socket that only holds the port
                with socket.create_connection(address, 240):
                    serving.accept()[0].close()


def test_a_port_that_others_listen_on_is_refused_to_who_does_not_share() -> None:
    with share("127.0.0.1", 0) as serving:
        serving.listen()
        with pytest.raises(OSError, match="in use"):
            listen(*serving.getsockname())


def test_a_unix_socket_takes_the_place_of_a_deserted_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listen_unix(path) as first:
        assert url_of(first) == f"unix:{path}"
        limit_unread(first, 1.0)
        with pytest.raises(OSError, match="in use"):
            listen_unix(path)
    with listen_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    path.unlink()
    path.write_text("a file of the user")
    with pytest.raises(OSError, match="in use"):
        listen_unix(path)
    assert path.read_text() == "a file of the user"


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "told"),
    [
        (1024, 20_000, 9_024, False),
        (1024, resource.RLIM_INFINITY, 9_024, False),
        (1024, 4096, 4096, True),
        (4096, 4096, 4096, True),
        (9_024, 20_000, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_as_many_files_may_be_open_as_connections_want(
    soft: int,
    hard: int,
    raised: int | None,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, given: limits.append(given))
    allow_connections(8000)
    assert limits == ([] if raised is None else [(raised, hard)])
    words = "may open 4096 files, 8000 connections want 9024"
    assert [words in message for message in caplog.messages] == [True] * told


def test_a_limit_that_cannot_be_raised_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(kind: int, given: tuple[int, int]) -> None:
        raise PermissionError

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 20_000))
    monkeypatch.setattr(resource, "setrlimit", forbidden)
    allow_connections(8000)
    assert "may open 1024 files" in caplog.text
