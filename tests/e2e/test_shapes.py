"""Answers with a shape, of a real server: whatever the field, the adapter and the temperature."""

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from loraplex.launcher.demo import EXAMPLES

SCHEMA = {
    "type": "object",
    "properties": {
        "order": {"type": "integer"},
        "urgent": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 12},
    },
    "required": ["order", "urgent", "name"],
    "additionalProperties": False,
}
NAMED = {"name": "ticket", "schema": SCHEMA}
CHOICES = ("order", "cancel", "or")
GRAMMAR = 'start: "order " NUMBER\nNUMBER: /[0-9]{3,5}/'
MODELS = ("json", "pirate", "loraplex/demo")


def texts(http: httpx.Client, **fields: Any) -> list[str]:
    """Of choices that ended by themselves; none ends otherwise."""
    messages = [{"role": "user", "content": EXAMPLES[0]}]
    body = {"model": "json", "messages": messages, "max_tokens": 200, "temperature": 0, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("temperature", [0, 2])
def test_schemas(http: httpx.Client, model: str, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": NAMED}
    asked = {"model": model, "temperature": temperature, "n": 2, "seed": 3}
    found = texts(http, response_format=form, **asked)
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert found == texts(http, structured_outputs={"json": json.dumps(SCHEMA)}, **asked)
    adapter = "" if model == "loraplex/demo" else model
    parameters = {"adapter_id": adapter, "response_format": form, "max_new_tokens": 200}
    answer = http.post("/generate", json={"inputs": EXAMPLES[0], "parameters": parameters})
    jsonschema.validate(json.loads(answer.json()["generated_text"]), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "^[0-9]{5}$"}, "[0-9]{5}"),
        ({"structured_outputs": {"choice": CHOICES}}, "|".join(CHOICES)),
        ({"guided_grammar": GRAMMAR}, "order [0-9]{3,5}"),
        ({"ebnf": 'root ::= "ab" [0-9]{2,3} | id\nid ::= "x" id | "y"'}, "ab[0-9]{2,3}|x*y"),
    ],
)
def test_other_forms(http: httpx.Client, fields: dict[str, Any], pattern: str) -> None:
    for model in MODELS:
        for text in texts(http, model=model, temperature=2, n=3, **fields):
            assert re.fullmatch(pattern, text), text


def test_free_names_come_once(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[ab]*$"},
        "additionalProperties": {"enum": [1, 2]},
        "minProperties": 3,
        "maxProperties": 6,
    }
    for model in MODELS:
        for text in texts(http, model=model, temperature=2, n=4, guided_json=schema):
            pairs = json.loads(text, object_pairs_hook=list)
            assert 3 <= len(pairs) == len(dict(pairs)), text


def test_a_stream_is_the_whole(http: httpx.Client) -> None:
    form = {"type": "json_object", "schema": SCHEMA}
    (whole,) = texts(http, response_format=form)
    body = {
        "model": "json",
        "messages": [{"role": "user", "content": EXAMPLES[0]}],
        "temperature": 0,
        "stream": True,
        "response_format": form,
    }
    lines = http.post("/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(deltas) == whole


def test_tokens_that_leave_none_are_refused(http: httpx.Client) -> None:
    body = {"model": "", "prompt": "a", "regex": "[0-9]{5}", "allowed_token_ids": [1]}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
