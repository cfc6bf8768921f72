"""The description: well-formed, and true of the application."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from router.api.openapi import openapi_document
from router.api.operations import OPERATIONS, Operation
from tests.router.serving import Running

DOCUMENT = openapi_document("1.2.3")
REGISTER = "post_v1_adapters"


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
            assert {"200", "201"} & operation["responses"].keys()
            assert all(response["description"] for response in operation["responses"].values())
            assert ("requestBody" not in operation) or method in ("post", "patch")
            places = [parameter["in"] for parameter in operation.get("parameters", ())]
            assert places.count("path") == path.count("{")
            says_whose = path.startswith("/v1/adapters") and operation["operationId"] != REGISTER
            if not path.startswith(("/v1/usage", "/v1/audit")):
                assert places.count("query") == says_whose
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


def test_limits_of_fields_are_told() -> None:
    top_p = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"]["top_p"]
    number = next(kind for kind in top_p["anyOf"] if kind["type"] == "number")
    assert (number["exclusiveMinimum"], number["maximum"]) == (0, 1)


def test_errors_have_their_shape() -> None:
    for path, status in (("/generate", "422"), ("/v1/completions", "400")):
        response = DOCUMENT["paths"][path]["post"]["responses"][status]
        reference = response["content"]["application/json"]["schema"]["$ref"]
        assert reference.endswith("OpenAIError" if path.startswith("/v1/") else "LoraxError")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{o.method} {o.path}")
async def test_every_operation_exists(router: Running, operation: Operation) -> None:
    path = operation.path.replace("{name}", "mine")
    if "{name}" in operation.path:
        registered = {"name": "mine", "ref": "org/one"}
        await router.client.post("/v1/adapters", json=registered)
    if "{id}" in path:
        made = await router.client.post("/v1/keys", content=b"{}")
        path = path.replace("{id}", made.json()["data"]["id"])
    if path.endswith("/rollout"):
        versions = [{"reference": "org/new", "weight": 5}]
        await router.client.post(path, json={"versions": versions})
    wants_a_body = operation.requests and not operation.accepted
    sends = operation.method in ("post", "patch")
    content = b"[]" if wants_a_body else b"{}" if sends else None
    answer = await router.client.request(operation.method, path, content=content)
    if wants_a_body:
        assert answer.status_code in (400, 422)
        return
    assert answer.status_code == operation.status
    for kind in operation.answers:
        typed = msgspec.json.decode(answer.content, type=kind)
        assert json.loads(msgspec.json.encode(typed)) == answer.json()
