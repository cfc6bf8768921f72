"""Helpers that cannot be started: said at the start, and no reason to try again."""

import logging

import pytest

from loraplex.router.helper_check import HELPERS, check_helpers
from tests.router.serving import Running

BROKEN = "raise ModuleNotFoundError('No module named of that name')"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.adapters.helpers.helper._PROGRAM", BROKEN)


async def metric(router: Running, helper: str) -> float:
    return await router.metric(f'loraplex_helper_broken{{helper="{helper}"}}')


async def test_all_is_well(router: Running) -> None:
    check_helpers(router.service.metrics.helper_broken)
    assert {name: await metric(router, name) for name in HELPERS} == dict.fromkeys(HELPERS, 0)


async def test_log_and_metric_say_which_cannot_start(
    router: Running, broken: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        check_helpers(router.service.metrics.helper_broken)
    assert {name: await metric(router, name) for name in HELPERS} == dict.fromkeys(HELPERS, 1)
    for module in HELPERS.values():
        assert f"{module} cannot be started: ModuleNotFoundError: No module named" in caplog.text


async def test_a_grammar_is_refused_for_good_with_the_reason(router: Running, broken: None) -> None:
    body = {"model": "", "messages": [{"role": "user", "content": "x"}], "guided_regex": "a"}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 501, answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert error["message"].startswith("grammars cannot be checked here: ModuleNotFoundError")
    assert error["param"] == "guided_regex"
