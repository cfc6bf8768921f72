"""From a request's form to the sampling that a worker gets, and what is refused before it waits."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher

from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.helpers.helper import Helper, HelperUnavailable
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.lost_helpers import kill_helpers
from tests.router.fake_worker import FakeWorker, ids_of, make_card, running_worker
from tests.router.serving import Running, running_router

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
BAD = {"type": "object", "properties": {"a": {"not": {"uniqueItems": True}}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


async def ask(router: Running, **fields: Any) -> httpx.Response:
    body = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], **fields}
    return await router.client.post(CHAT, json=body)


async def generate(router: Running, **fields: Any) -> httpx.Response:
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 4, **fields}}
    return await router.client.post("/generate", json=body)


async def test_the_worker_gets_one_grammar(router: Running, worker: FakeWorker) -> None:
    for fields in ({"response_format": FORMAT}, {"guided_json": SCHEMA}):
        answer = await ask(router, n=2, **fields)
        assert answer.status_code == 200, answer.text
    form = {"type": "json_object", "schema": SCHEMA}
    assert (await generate(router, response_format=form)).status_code == 200
    sent = {request.sampling.grammar for request in worker.requests}
    assert len(sent) == 1
    assert not LLMatcher.validate_grammar(sent.pop())
    assert (await ask(router)).status_code == 200
    assert worker.requests[-1].sampling.grammar == ""


async def test_words_become_tokens(router: Running, worker: FakeWorker) -> None:
    answer = await ask(router, bad_words=["no"], allowed_token_ids=[4, 3])
    assert answer.status_code == 200, answer.text
    sampling = worker.requests[-1].sampling
    assert sampling.bad_words == (tuple(ids_of("no")), tuple(ids_of(" no")))
    assert sampling.allowed_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"ebnf": 'root ::= "a" other'}, "ebnf"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json.uniqueItems"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": BAD},
                }
            },
            "response_format.json_schema.schema.properties.a.not",
        ),
        ({"structured_outputs": {"grammar": "start: /" + "(" * 200 + "/"}}, "structured_outputs"),
        ({"guided_grammar": "start: " + "(" * 200 + '"a"' + ")" * 200}, "guided_grammar"),
        ({"allowed_token_ids": [1 << 20]}, "allowed_token_ids"),
    ],
)
async def test_bad_grammars_never_wait(
    router: Running, worker: FakeWorker, fields: dict[str, Any], param: str
) -> None:
    for _ in range(2):
        answer = await ask(router, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(param)
        assert f"`{param}" in error["message"] or "token ids" in error["message"]
    assert not worker.requests


async def test_a_lost_checker_is_replaced(router: Running) -> None:
    for number in range(3):
        assert (await ask(router, guided_regex=f"a{number}")).status_code == 200
        kill_helpers("loraplex.adapters.grammar.trial_process")
        for _ in range(2):
            assert (await ask(router, guided_regex=f"b{number}")).status_code == 200


async def test_checkers_that_are_lost_say_nothing_that_is_kept(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(child: Helper, question: bytes) -> bytes:
        raise HelperUnavailable("it was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Helper, "ask", lose)
        answer = await ask(router, guided_regex="ab")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
    assert (await ask(router, guided_regex="ab")).status_code == 200


async def test_loraxs_routes_say_422(router: Running) -> None:
    answer = await generate(router, grammar={"type": "regex", "value": "("})
    assert answer.status_code == 422
    assert "grammar.value" in answer.json()["error"]


async def test_a_model_without_ends_holds_to_no_form(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker(card=make_card(eos_token_ids=()))) as worker,
        running_router(tmp_path, worker) as router,
    ):
        answer = await ask(router, model="", guided_regex="a")
        assert answer.status_code == 400
        assert "no end token" in answer.json()["error"]["message"]


async def test_what_the_engine_cannot_hold_to_is_the_callers_fault(
    router: Running, worker: FakeWorker
) -> None:
    async def refuse(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode:
        return "bad_grammar"

    worker.before_token = refuse
    answer = await ask(router, guided_regex="a")
    assert answer.status_code == 400, answer.text
    assert len(worker.requests) == 1


async def test_options_bound_grammars(tmp_path: Path, worker: FakeWorker) -> None:
    async with running_router(tmp_path, worker, grammar=GrammarLimits(source_bytes=100)) as router:
        assert (await ask(router, model="", guided_regex="a" * 50)).status_code == 200
        answer = await ask(router, model="", guided_regex="a" * 100)
        assert answer.status_code == 400
        assert "at most 100 may be" in answer.json()["error"]["message"]
