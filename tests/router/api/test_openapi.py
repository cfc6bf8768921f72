"""The description: well-formed, and true of the application."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from loraplex.router.api import sagemaker
from loraplex.router.api.errors import error_object
from loraplex.router.api.messages import request as messages
from loraplex.router.api.openai import chat as openai_chat
from loraplex.router.api.openai import completions
from loraplex.router.api.openapi import Access, openapi_document
from loraplex.router.api.operations import OPERATIONS, Operation
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import RequestError
from loraplex.router.policy.batch_limits import ResponsesLimits
from tests.router.batches.running_batches import BatchUser, Held, line
from tests.router.fake_worker import BASE_NAME, FakeWorker
from tests.router.serving import Running, running_router

DOCUMENT = openapi_document("1.2.3")
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from nodes(child)
    elif isinstance(value, list):
        for child in value:
            yield from nodes(child)


def test_is_json() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert DOCUMENT["openapi"] == "3.1.0"


def test_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    references = [node["$ref"] for node in nodes(DOCUMENT) if "$ref" in node]
    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in schemas


def test_operations_are_whole() -> None:
    ids = []
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            ids.append(operation["operationId"])
            assert operation["summary"]
            is_refusal = path == "/flush_cache"  # it says why
            assert is_refusal or {"200", "201"} & operation["responses"].keys()
            assert all(response["description"] for response in operation["responses"].values())
            assert ("requestBody" not in operation) or method in ("post", "put", "patch")
            places = [parameter["in"] for parameter in operation.get("parameters", ())]
            assert places.count("path") == path.count("{")
            (described,) = [o for o in OPERATIONS if (o.path, o.method) == (path, method)]
            assert places.count("query") == len(described.query)
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


def test_limits_of_fields_are_reported() -> None:
    field = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"]["typical_p"]
    number = next(kind for kind in field["anyOf"] if kind["type"] == "number")
    assert (number["exclusiveMinimum"], number["maximum"]) == (0, 1)


def test_errors_have_their_shape() -> None:
    for path, status, kind in (
        ("/generate_stream", "422", "LoraxError"),
        ("/v1/completions", "400", "OpenAIError"),
        ("/v1/messages", "529", "AnthropicError"),
    ):
        response = DOCUMENT["paths"][path]["post"]["responses"][status]
        reference = response["content"]["application/json"]["schema"]["$ref"]
        assert reference.endswith(kind)


def wants_a_body(operation: Operation) -> bool:
    return bool(operation.requests) and not operation.accepted


# What changes nothing can be asked of one router: a body that is none is refused.
READS = [
    one for one in OPERATIONS if wants_a_body(one) or (one.method == "get" and "{" not in one.path)
]
IN_ONE = [READS, *([one] for one in OPERATIONS if one not in READS)]


@pytest.mark.parametrize("operations", IN_ONE, ids=lambda some: f"{some[0].method} {some[0].path}")
async def test_every_operation_exists(
    tmp_path: Path, worker: FakeWorker, operations: list[Operation]
) -> None:
    Held(worker)  # a batch is not over when it is cancelled
    prices = tmp_path / "prices"
    prices.write_text("{currency: EUR, prices: []}")
    options: Any = {"files_dir": tmp_path / "files", "responses": ResponsesLimits(keep_s=60)}
    options["prices"] = prices
    async with running_router(tmp_path, worker, **options) as router:
        for operation in operations:
            await check_operation(router, operation)


async def test_a_refused_method_says_which_are_described(
    tmp_path: Path, worker: FakeWorker
) -> None:
    options: Any = {"files_dir": tmp_path / "files", "responses": ResponsesLimits(keep_s=60)}
    async with running_router(tmp_path, worker, **options) as router:
        for path, methods in DOCUMENT["paths"].items():
            answer = await router.client.options(path.replace("{name}", "a").replace("{id}", "a"))
            allowed = set(answer.headers["allow"].split(", ")) - {"HEAD"}
            assert (path, answer.status_code) == (path, 405)
            assert (path, allowed) == (path, {method.upper() for method in methods})


async def check_operation(router: Running, operation: Operation) -> None:
    path = operation.path.replace("{name}", "mine")
    if "{name}" in operation.path and operation.method != "put":
        registered = {"name": "mine", "ref": "org/one"}
        await router.client.post("/v1/adapters", json=registered)
    if path.startswith(("/v1/files/", "/v1/batches/")):
        batch = await BatchUser(router).start([line("a")])
        file = await BatchUser(router).upload(b"{}")
        path = path.replace("{id}", (batch if "batches" in path else file)["id"])
    elif path.startswith("/v1/responses/"):
        asked = {"model": BASE_NAME, "input": "a", "background": True}
        made = await router.client.post("/v1/responses", json=asked)
        path = path.replace("{id}", made.json()["id"])
    elif "{id}" in path:
        made = await router.client.post("/v1/keys", content=b"{}")
        path = path.replace("{id}", made.json()["data"]["id"])
    if "start_time" in operation.query:
        path += "?start_time=0"
    if path.endswith("/rollout"):
        versions = [{"reference": "org/new", "weight": 5}]
        await router.client.post(path, json={"versions": versions})
    sends = operation.method in ("post", "put", "patch")
    content = b"[]" if wants_a_body(operation) else b"{}" if sends else None
    answer = await router.client.request(operation.method, path, content=content)
    if wants_a_body(operation):
        assert answer.status_code in (400, 415, 422), path
        return
    assert answer.status_code == operation.status, path
    for kind in operation.answers:
        typed = msgspec.json.decode(answer.content, type=kind)
        assert json.loads(msgspec.json.encode(typed)) == answer.json()


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("callers", [False, True])
def test_each_route_says_which_key_this_router_asks_for(operators: bool, callers: bool) -> None:
    paths = openapi_document("1", Access(operators, callers))["paths"]

    def keys(method: str, path: str) -> list[str]:
        return [key for one in paths[path][method].get("security", []) for key in one]

    for method, path in (("get", "/v1/keys"), ("post", "/v1/load_lora_adapter")):
        assert keys(method, path) == ["adminKey"] * operators
    for method, path in (("get", "/v1/models"), ("post", "/tokenize"), ("post", "/generate")):
        assert keys(method, path) == ["callerKey"] * callers
    for path in ("/health", "/version", "/ping", "/openapi.json"):
        assert keys("get", path) == []


def schema_of(document: dict[str, Any], *way: str) -> Draft202012Validator:
    """The schema that lies there, with the components that it refers to."""
    found = document
    for step in way:
        found = found[step]
    return Draft202012Validator({**found, "components": document["components"]})


@cache
def body_schema(name: str, **limits: Any) -> Draft202012Validator:
    """The schema of a body, as a router with these limits describes it."""
    document = openapi_document("1", limits=ApiLimits(**limits))
    return schema_of(document, "components", "schemas", name)


@pytest.mark.parametrize(
    ("body", "is_good"),
    [
        ({}, True),
        ({"n": 3}, True),
        ({"n": 4}, False),
        ({"stop": ["a", "b"]}, True),
        ({"stop": ["a", "b", "c"]}, False),
        ({"stop": "a" * 2000}, False),
        ({"logit_bias": {"7": 1}}, True),
        ({"logit_bias": {"x": 1}}, False),
        ({"surprise": None, "store": True, "tools": []}, True),
        ({"surprise": 1}, False),
        ({"tools": [{}]}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "user"}]}, False),
        ({"messages": [{"role": "assistant", "content": None}]}, True),
        ({"messages": [{"role": "user", "content": None}]}, False),
        ({"messages": [{"role": "user", "content": []}]}, False),
        ({"messages": [{"role": "tool", "content": []}]}, True),
        ({"messages": [{"role": "tool", "tool_calls": [{}]}]}, False),
        ({"messages": [{"role": "function"}]}, False),
        ({"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, True),
        ({"messages": [{"role": "user", "content": [PICTURE | {"image_url": "x"}]}]}, True),
        ({"messages": [{"role": "user", "content": [PICTURE | {"image_url": 3}]}]}, False),
    ],
)
def test_what_is_described_is_what_is_parsed(body: dict[str, Any], is_good: bool) -> None:
    limits: dict[str, Any] = {"max_n": 3, "max_stop_sequences": 2}
    body = {"model": "", "messages": [{"role": "user", "content": "x"}], **body}
    assert body_schema("ChatBody", **limits).is_valid(body) == is_good
    try:
        openai_chat.parse(json.dumps(body).encode(), ApiLimits(**limits))
        assert is_good
    except RequestError:
        assert not is_good


@pytest.mark.parametrize(
    ("body", "is_good"),
    [
        ({}, True),
        ({"max_tokens": None}, False),
        ({"max_tokens": None, "max_new_tokens": 1}, True),
        ({"max_tokens": None, "max_new_tokens": 0}, False),
        ({"max_completion_tokens": None}, True),
        ({"stop_sequences": ["a", "b"]}, True),
        ({"stop_sequences": ["a", "b", "c"]}, False),
        ({"stop_sequences": ["a" * 2000]}, False),
        ({"stop": "a"}, False),
        ({"stop": [], "container": None, "surprise": None}, True),
        ({"surprise": 1}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "user", "content": []}]}, False),
        ({"metadata": {"user": "me"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"system": [{"type": "image"}]}, False),
        ({"tools": [{"name": "f"}]}, False),
        ({"tools": [{"name": "f", "input_schema": {}, "type": "custom"}]}, True),
        ({"tools": [{"name": "f", "input_schema": {}, "type": "bash_20250124"}]}, False),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, True),
        ({"tool_choice": {"type": "robot"}}, False),
    ],
)
def test_messages_are_described_as_they_are_parsed(body: dict[str, Any], is_good: bool) -> None:
    limits: dict[str, Any] = {"max_stop_sequences": 2}
    said = [{"role": "user", "content": "x"}]
    body = {"model": "", "messages": said, "max_tokens": 1} | body
    assert body_schema("MessagesBody", **limits).is_valid(body) == is_good
    try:
        messages.parse(json.dumps(body).encode(), ApiLimits(**limits))
        assert is_good
    except RequestError:
        assert not is_good


@pytest.mark.parametrize("task", [None, {}, "embed"])
def test_messages_of_invocations_are_a_chat_unless_a_task_is_named(task: object) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "use_activation": True, "task": task}
    way = ("paths", "/invocations", "post", "requestBody", "content", "application/json", "schema")
    assert schema_of(DOCUMENT, *way).is_valid(body) == bool(task)
    with nullcontext() if task else pytest.raises(RequestError):
        sagemaker.parse(body, sagemaker.Invocation(), ApiLimits(), None)


def test_events_of_streams_are_described() -> None:
    way = ("paths", "/v1/completions", "post", "responses", "200", "content", "text/event-stream")
    event = schema_of(DOCUMENT, *way, "schema")
    assert event.is_valid({"data": "[DONE]"})
    payload = DOCUMENT
    for step in way:
        payload = payload[step]
    described = payload["schema"]["anyOf"][1]["properties"]["data"]["contentSchema"]
    one = Draft202012Validator({**described, "components": DOCUMENT["components"]})
    error = error_object(RequestError("incomplete", "it broke off"), "openai")
    assert one.is_valid(json.loads(msgspec.json.encode(error)))
    assert not one.is_valid({"error": "a text"})


TOO_MUCH: dict[str, list[tuple[str, Any]]] = {
    "ChatBody": [
        ("n", 4),
        ("top_logprobs", 3),
        ("prompt_logprobs", 3),
        ("logprob_token_ids", [1, 2, 3]),
        ("stop", ["a", "b", "c"]),
        ("stop", "abcdef"),
        ("stop", ["abcdef"]),
        ("stop_regex", ["a", "b", "c"]),
        ("stop_token_ids", [1, 2, 3]),
        ("logit_bias", {"1": 1, "2": 1, "3": 1}),
        ("bad_words", ["a", "b", "c"]),
        ("bad_words", ["abcdef"]),
    ],
    "CompletionsBody": [("best_of", 4), ("logprobs", 3)],
}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(name, *case) for name, cases in TOO_MUCH.items() for case in cases],
)
def test_options_bounds_are_checked_and_described(name: str, field: str, value: Any) -> None:
    limits: dict[str, Any] = {
        "max_n": 3,
        "max_logprobs": 2,
        "max_stop_sequences": 2,
        "max_stop_chars": 5,
        "max_stop_token_ids": 2,
        "max_logit_bias": 2,
        "max_bad_words": 2,
    }
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    body = {"model": "", field: value} | (chat if name == "ChatBody" else {"prompt": "x"})
    assert not body_schema(name, **limits).is_valid(body)
    parse = openai_chat.parse if name == "ChatBody" else completions.parse
    with pytest.raises(RequestError) as caught:
        parse(json.dumps(body).encode(), ApiLimits(**limits))
    assert caught.value.param == field
