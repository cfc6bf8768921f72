"""The API's own description (OpenAPI 3.1), made from the structs that read and write it. Pure.

It is of one router: which keys are asked for and what a body may ask for depend on options.
"""

from typing import Any

import msgspec

from loraplex.router.api.admin.keys import MAX_LISTED
from loraplex.router.api.admin.operations import OPERATIONS, Operation
from loraplex.router.api.errors import AnthropicError, Dialect, LoraxError, OpenAIError, error_table
from loraplex.router.api.files.requests import MAX_FILES_LISTED
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.schema_limits import Schema, say_limits

_ERRORS: dict[Dialect, Any] = {
    "lorax": LoraxError,
    "openai": OpenAIError,
    "vllm": OpenAIError,
    "anthropic": AnthropicError,
}
_REF = "#/components/schemas/{name}"
# Errors that a GET without a body can meet.
_PLAIN_ERRORS = frozenset((404, 405, 500, 503))
_BODY_ERRORS = frozenset((408, 413, 415))
_ADMIN_ERRORS = _PLAIN_ERRORS | {400, 401, 403, 409, 410, 422}
_TEXT: Schema = {"type": "string"}
_DAY: Schema = {"type": "string", "format": "date"}
_QUERY: dict[str, Schema] = {
    "start": _DAY,
    "end": _DAY,
    "key": _TEXT,
    "adapter": _TEXT,
    "after": _TEXT,
    "purpose": _TEXT,
    "order": {"enum": ["asc", "desc"]},
    "limit of /v1/files": {"type": "integer", "minimum": 1, "maximum": MAX_FILES_LISTED},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
    "tenant": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"},
}


class Access(msgspec.Struct, frozen=True):
    """Which keys a router asks for: operators, and callers."""

    operators: bool = True
    callers: bool = True


_KEYED = Access()
_USUAL = ApiLimits()


def openapi_document(
    version: str, access: Access = _KEYED, limits: ApiLimits = _USUAL
) -> dict[str, Any]:
    """The whole document, ready for JSON."""
    types = [*_ERRORS.values()]
    for operation in OPERATIONS:
        types += [*operation.requests, *operation.answers, *operation.events]
    found = msgspec.json.schema_components(types, ref_template=_REF)
    schemas, components = msgspec.json.decode(msgspec.json.encode(found))  # defaults are tuples
    say_limits(components, limits)
    # Hashable keys: list[X] is equal to itself, not identical.
    schema_of = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        described = _operation(operation, schema_of, access)
        paths.setdefault(operation.path, {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "loraplex", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "adminKey": {"type": "http", "scheme": "bearer"},
                "callerKey": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(operation: Operation, schema_of: dict[str, Any], access: Access) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "responses": {str(operation.status): _success(operation, schema_of)}
        | _errors(operation, schema_of),
    }
    if operation.accepted:
        described["responses"]["202"] = described["responses"]["200"] | {"description": "goes on"}
    keys = _keys(operation, access)
    if keys:
        described["security"] = [{key: []} for key in keys]
    if operation.requests:
        described["requestBody"] = {
            "required": not operation.may_be_empty,
            "content": {operation.media: {"schema": _any_of(operation.requests, schema_of)}},
        }
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [
        *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in in_path),
        *(
            {"name": name, "in": "query", "schema": _query(operation, name)}
            for name in operation.query
        ),
    ]
    if parameters:
        described["parameters"] = parameters
    return described


def _query(operation: Operation, name: str) -> Schema:
    return _QUERY.get(f"{name} of {operation.path}", _QUERY[name])


def _keys(operation: Operation, access: Access) -> list[str]:
    """Schemes of which one must be met; none = anybody may ask."""
    if operation.admin:
        return ["adminKey"] if access.operators else []
    wants_key = operation.key or operation.requests
    return ["callerKey"] if wants_key and access.callers else []


def _any_of(types: tuple[Any, ...], schema_of: dict[str, Any]) -> Schema:
    schemas = [schema_of[repr(kind)] for kind in types]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _success(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answers:
        content["application/json"] = {"schema": _any_of(operation.answers, schema_of)}
    if operation.events:
        content["text/event-stream"] = {"schema": _event(operation, schema_of)}
    if operation.text:
        content["text/plain"] = {"schema": _TEXT}
    described: dict[str, Any] = {"description": "success"}
    return described | ({"content": content} if content else {})


def _event(operation: Operation, schema_of: dict[str, Any]) -> Schema:
    """One event of a stream. Where the answer breaks off, the last one is the error."""
    errors = [_ERRORS[dialect] for dialect in _dialects(operation)]
    payload = _any_of((*operation.events, *errors), schema_of)
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    event: Schema = {"type": "object", "required": ["data"], "properties": {"data": data}}
    if not operation.done:
        return event
    last = {"type": "object", "required": ["data"], "properties": {"data": {"const": "[DONE]"}}}
    return {"anyOf": [last, event]}


def _errors(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    answers: dict[int, tuple[list[str], list[Any]]] = {}
    for dialect in _dialects(operation):
        for status, names in error_table(dialect).items():
            if operation.requests or status in _errors_of(operation):
                said, types = answers.setdefault(status, ([], []))
                said += [name for name in names if name not in said]
                types.append(_ERRORS[dialect])
    return {
        str(status): {
            "description": ", ".join(said),
            "content": {"application/json": {"schema": _any_of(tuple(types), schema_of)}},
        }
        for status, (said, types) in sorted(answers.items())
    }


def _dialects(operation: Operation) -> list[Dialect]:
    both = (operation.dialect, operation.other_dialect)
    return [dialect for dialect in both if dialect is not None]


def _errors_of(operation: Operation) -> frozenset[int]:
    if operation.admin:
        return _ADMIN_ERRORS if operation.method == "get" else _ADMIN_ERRORS | _BODY_ERRORS
    if not operation.key:
        return _PLAIN_ERRORS
    keyed = _PLAIN_ERRORS | {400, 401, 403, 501}
    return keyed if operation.method == "get" else keyed | _BODY_ERRORS | {409}


def _operation_id(operation: Operation) -> str:
    words = [word.strip("{}") for word in operation.path.replace(".", "_").split("/") if word]
    return "_".join([operation.method, *(words or ["root"])])
