"""The key commands' words to a router, and what they make of its answers."""

import hashlib
import re
from typing import Any

import pytest

from loraplex.launcher.__main__ import main
from loraplex.router.tenancy.keys import read_keys
from tests.launcher.test_lifecycle_commands import StubRouter, stub

__all__ = ["stub"]

KEY = {
    "id": "app", "object": "key", "tenant": "acme", "label": "the app", "models": ["sql", "a/*"],
    "limits": {"requests_per_minute": 5, "tokens_per_minute": None, "concurrency": None,
               "budget_tokens": None, "budget_period_s": 86400},
    "expires_at": 1893456000, "blocked": False, "created_at": 1, "origin": "api",
}  # fmt: skip


def run(stub: StubRouter, *words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["key", *words, "--url", stub.url])
    return ended.value.code


@pytest.fixture
def keys(stub: StubRouter) -> StubRouter:
    stub.answer = (200, KEY)
    return stub


def test_create(keys: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    keys.answer = (201, {"object": "new_key", "key": "lpx_secret", "data": KEY})
    words = ("--id", "app", "--tenant", "acme", "--model", "sql", "--model", "a/*")
    limits = ("--requests-per-minute", "5", "--expires", "2030-01-01T00:00:00Z")
    assert run(keys, "create", *words, *limits, "--priority", "low") == 0
    assert capsys.readouterr() == ("lpx_secret\n", "")
    method, path, body, authorization = keys.asked[0]
    assert (method, path, authorization) == ("POST", "/v1/keys", "Bearer from the environment")
    assert body == {
        "id": "app", "tenant": "acme", "models": ["sql", "a/*"], "expires_at": 1893456000,
        "limits": {"requests_per_minute": 5}, "priority": "low",
    }  # fmt: skip


def test_hints_do_not_stand_where_programs_read_the_key(
    keys: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"object": "new_key", "key": "lpx_secret", "data": KEY, "hints": ["it ends soon"]}
    keys.answer = (201, answer)
    assert run(keys, "create", "--id", "app") == 0
    assert capsys.readouterr() == ("lpx_secret\n", "loraplex: it ends soon\n")


def test_list_is_a_table(keys: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    keys.answer = (200, {"object": "list", "data": [KEY, {**KEY, "id": "b", "blocked": True}]})
    assert run(keys, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", lines[1]) == [
        *("app", "acme", "good", "sql,a/*", "requests_per_minute: 5", "2030-01-01T00:00:00Z"),
        *("api", "the app"),
    ]
    assert "blocked" in lines[2]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("block", "a", "b"), [("POST", "/v1/keys/a/block"), ("POST", "/v1/keys/b/block")]),
        (("unblock", "a"), [("POST", "/v1/keys/a/unblock")]),
        (("delete", "a/b"), [("DELETE", "/v1/keys/a%2Fb")]),
    ],
)
def test_actions(keys: StubRouter, words: tuple[str, ...], asked: list[Any]) -> None:
    assert run(keys, *words) == 0
    assert [(method, path) for method, path, *_ in keys.asked] == asked


def test_rotate(keys: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    keys.answer = (200, {"object": "new_key", "key": "lpx_next", "data": KEY})
    assert run(keys, "rotate", "app", "--grace", "60") == 0
    assert capsys.readouterr().out == "lpx_next\n"
    assert keys.asked[0][:3] == ("POST", "/v1/keys/app/rotate", {"grace_s": 60})


def test_a_refusal_is_reported(keys: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    keys.answer = (409, {"error": {"message": "there is a key 'app' already"}})
    assert run(keys, "create", "--id", "app") == 1
    assert capsys.readouterr().err == "loraplex: there is a key 'app' already\n"


def test_a_time_without_a_zone(keys: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(keys, "create", "--expires", "2030-01-01") == 2
    assert "--expires must be a time with its zone" in capsys.readouterr().err
    assert not keys.asked


@pytest.mark.parametrize("key_id", ["my app", "-", "a" * 65, "a: b"])
def test_an_id_that_no_file_may_hold(key_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["key", "generate", "--", key_id])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, "ID must be a word" in err) == ("", True)


def test_generated_keys_fit_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["key", "generate", "app"])
    assert ended.value.code == 0
    key, _, file = capsys.readouterr().out.partition("\n")
    (entry,), _ = read_keys(file.encode())
    assert (entry.id, entry.digest) == ("app", hashlib.sha256(key.encode()).hexdigest())
