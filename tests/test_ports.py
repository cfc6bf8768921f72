"""Ports that tests hand to servers."""

import socket

import pytest

from tests.ports import _own_ports, free_port


def test_each_is_given_once_and_can_be_had() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50
    for port in given:
        socket.create_server(("127.0.0.1", port)).close()


def test_what_is_taken_is_passed_over() -> None:
    first = free_port()
    with socket.create_server(("127.0.0.1", first + 1)):
        assert first + 1 not in {free_port() for _ in range(3)}
        pair = free_port(2)
    assert first + 1 not in (pair, pair + 1)
    for port in (pair, pair + 1):
        socket.create_server(("127.0.0.1", port)).close()


def test_processes_of_a_run_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for number in range(4):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        parts.append(set(_own_ports()))
    assert sum(map(len, parts)) == len(set.union(*parts))
