"""The API's own description (OpenAPI 3.1), made from the structs that read and write it. Pure."""

from typing import Any, Literal

import msgspec

from router.api.adapters import (
    AdapterList,
    AdapterObject,
    Deleted,
    LoadLoraBody,
    Refreshed,
    RegisterBody,
    UnloadBody,
    UnloadLoraBody,
)
from router.api.errors import Dialect, LoraxError, OpenAIError, error_table
from router.api.fleet import FleetObject
from router.api.keys import (
    AuditList,
    ChangeKeyBody,
    CreateKeyBody,
    DeletedKey,
    KeyList,
    KeyObject,
    NewKeyObject,
    RecordList,
    RotateKeyBody,
    UsageList,
)
from router.api.lorax import LoraxBody
from router.api.lorax_answer import GenerateAnswer, StreamAnswer
from router.api.models import (
    Health,
    Info,
    ModelList,
    ModelObject,
    TokenizeBody,
    TokenObject,
)
from router.api.openai_chat import ChatBody
from router.api.openai_chat_answer import ChatChunk, ChatCompletion
from router.api.openai_completions import CompletionsBody
from router.api.openai_completions_answer import Completion
from router.api.rollouts import AdapterHistory, DigestBody, RolloutBody, RolloutObject

_REF = "#/components/schemas/{name}"
# Errors that a GET without a body can meet.
_PLAIN_ERRORS = frozenset((404, 405, 500, 503))
_BODY_ERRORS = frozenset((408, 413, 415))
_ADMIN_ERRORS = _PLAIN_ERRORS | {400, 401, 403, 409, 410, 422}


Method = Literal["get", "post", "patch", "delete"]


class Operation(msgspec.Struct, frozen=True):
    """A route. answer, event: types of the JSON body and of a stream's events.

    text: the answer is plain text. dialect: shape of its errors. admin: it wants the admin key.
    accepted: it may answer 202 with the same body, for what goes on. key: it wants a caller's key
    where callers have keys. status: of success.
    """

    path: str
    method: Method
    summary: str
    dialect: Dialect = "lorax"
    request: Any = None
    answer: Any = None
    event: Any = None
    text: bool = False
    admin: bool = False
    accepted: bool = False
    key: bool = False
    status: int = 200
    query: tuple[str, ...] = ()


def _admin(
    path: str,
    method: Method,
    summary: str,
    answer: Any,
    request: Any = None,
) -> Operation:
    return Operation(
        *(path, method, summary, "openai"),
        request=request,
        answer=None if answer is str else answer,
        text=answer is str,
        admin=True,
        accepted=path.endswith("/unload"),
    )


_KEY = "/v1/keys/{id}"
_KEYS = (
    _admin("/v1/keys", "get", "Keys of callers", KeyList),
    msgspec.structs.replace(
        _admin("/v1/keys", "post", "Make a key; it is told this once", NewKeyObject, CreateKeyBody),
        status=201,
    ),
    _admin(_KEY, "get", "One of them", KeyObject),
    _admin(_KEY, "patch", "Change what it opens, its limits or its end", KeyObject, ChangeKeyBody),
    _admin(_KEY, "delete", "Delete it", DeletedKey),
    _admin(f"{_KEY}/rotate", "post", "Another key in its place", NewKeyObject, RotateKeyBody),
    _admin(f"{_KEY}/block", "post", "It opens nothing for now", KeyObject),
    _admin(f"{_KEY}/unblock", "post", "It opens again what it opened", KeyObject),
    Operation(
        *("/v1/usage", "get", "What was used", "openai"),
        answer=UsageList,
        key=True,
        query=("start", "end", "tenant", "key", "adapter"),
    ),
    Operation(
        *("/v1/usage/requests", "get", "Latest requests", "openai"),
        answer=RecordList,
        key=True,
        query=("limit", "tenant"),
    ),
    msgspec.structs.replace(
        _admin("/v1/audit", "get", "What operators did", AuditList), query=("limit",)
    ),
)
_ONE = "/v1/adapters/{name}"
_NAMED = (
    _admin("/v1/adapters", "get", "Registered adapters, by tier and worker", AdapterList),
    _admin(_ONE, "get", "One of them", AdapterObject),
    _admin(_ONE, "delete", "Delete it: requests that name it get 410", Deleted),
    _admin(f"{_ONE}/load", "post", "To every worker's device, and into service", AdapterObject),
    _admin(f"{_ONE}/pin", "post", "The same; and there it stays", AdapterObject),
    _admin(f"{_ONE}/unpin", "post", "It may be evicted again", AdapterObject),
    _admin(
        *(f"{_ONE}/unload", "post", "Out of service; freed when running requests are over"),
        AdapterObject,
        UnloadBody,
    ),
    _admin(f"{_ONE}/refresh", "post", "Resolve its reference again", Refreshed),
    _admin(f"{_ONE}/rollout", "get", "Its versions, and how they do", RolloutObject),
    _admin(f"{_ONE}/rollout", "post", "Set versions and their weights", AdapterObject, RolloutBody),
    _admin(f"{_ONE}/rollout", "delete", "End it: the old version has everything", AdapterObject),
    _admin(f"{_ONE}/promote", "post", "The name means this version", AdapterObject, DigestBody),
    _admin(f"{_ONE}/rollback", "post", "Back to the version before", AdapterObject, DigestBody),
    _admin(f"{_ONE}/history", "get", "What it meant, newest first", AdapterHistory),
)
_LIFECYCLE = (
    *(msgspec.structs.replace(operation, query=("tenant",)) for operation in _NAMED),
    _admin("/v1/adapters", "post", "Register an adapter", AdapterObject, RegisterBody),
    _admin("/v1/load_lora_adapter", "post", "Register and load (vLLM)", str, LoadLoraBody),
    _admin("/v1/unload_lora_adapter", "post", "Unload and delete (vLLM)", str, UnloadLoraBody),
)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        *("/", "post", "Generate, whole (a list of one) or streamed, as `stream` says"),
        request=LoraxBody,
        answer=list[GenerateAnswer],
        event=StreamAnswer,
    ),
    Operation("/", "get", "Whether requests can be answered"),
    Operation("/generate", "post", "Generate", request=LoraxBody, answer=GenerateAnswer),
    Operation(
        *("/generate_stream", "post", "Generate, token by token"),
        request=LoraxBody,
        event=StreamAnswer,
    ),
    Operation(
        *("/v1/completions", "post", "Complete texts (OpenAI)", "openai"),
        request=CompletionsBody,
        answer=Completion,
        event=Completion,
    ),
    Operation(
        *("/v1/chat/completions", "post", "Answer a conversation (OpenAI)", "openai"),
        request=ChatBody,
        answer=ChatCompletion,
        event=ChatChunk,
    ),
    Operation(
        *("/v1/models", "get", "The base and registered adapters", "openai"),
        answer=ModelList,
        key=True,
    ),
    Operation("/v1/models/{name}", "get", "One of them", "openai", answer=ModelObject, key=True),
    *_KEYS,
    *_LIFECYCLE,
    Operation(
        *("/v1/fleet", "get", "Workers, arenas, queue and errors, at once or followed", "openai"),
        answer=FleetObject,
        event=FleetObject,
        admin=True,
    ),
    Operation(
        *("/tokenize", "post", "The tokens of a text"),
        request=TokenizeBody,
        answer=list[TokenObject],
    ),
    Operation("/info", "get", "The model and the limits", answer=Info),
    Operation("/health", "get", "Whether requests can be answered"),
    Operation("/health/live", "get", "Whether the process answers", answer=Health),
    Operation("/health/ready", "get", "Whether requests can be answered", answer=Health),
    Operation("/metrics", "get", "Prometheus metrics", text=True),
    Operation("/openapi.json", "get", "This description", answer=dict[str, Any]),
)


def openapi_document(version: str) -> dict[str, Any]:
    """The whole document, ready for JSON."""
    types = [LoraxError, OpenAIError]
    for operation in OPERATIONS:
        types += [t for t in (operation.request, operation.answer, operation.event) if t]
    found = msgspec.json.schema_components(types, ref_template=_REF)
    schemas, components = msgspec.json.decode(msgspec.json.encode(found))  # defaults are tuples
    # Hashable keys: list[X] is equal to itself, not identical.
    schema_of = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of)
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


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "responses": {str(operation.status): _success(operation, schema_of)}
        | _errors(operation, schema_of),
    }
    if operation.accepted:
        described["responses"]["202"] = described["responses"]["200"] | {"description": "goes on"}
    if operation.admin:
        described["security"] = [{"adminKey": []}]
    elif operation.key or operation.request is not None:
        # Where callers have no keys, none is needed.
        described["security"] = [{}, {"callerKey": []}]
    if operation.request is not None:
        described["requestBody"] = {
            "required": not operation.accepted and operation.request is not RotateKeyBody,
            "content": {"application/json": {"schema": schema_of[repr(operation.request)]}},
        }
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [*(("path", name) for name in in_path), *(("query", q) for q in operation.query)]
    if parameters:
        described["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for place, name in parameters
        ]
    return described


def _success(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": schema_of[repr(operation.answer)]}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": schema_of[repr(operation.event)]}
    if operation.text:
        content["text/plain"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {"description": "success"}
    return described | ({"content": content} if content else {})


def _errors(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    kind = LoraxError if operation.dialect == "lorax" else OpenAIError
    schema = {"schema": schema_of[repr(kind)]}
    return {
        str(status): {
            "description": ", ".join(names),
            "content": {"application/json": schema},
        }
        for status, names in error_table(operation.dialect).items()
        if operation.request is not None or status in _errors_of(operation)
    }


def _errors_of(operation: Operation) -> frozenset[int]:
    if operation.admin:
        return _ADMIN_ERRORS if operation.method == "get" else _ADMIN_ERRORS | _BODY_ERRORS
    return _PLAIN_ERRORS | {400, 401, 403} if operation.key else _PLAIN_ERRORS


def _operation_id(operation: Operation) -> str:
    words = [word.strip("{}") for word in operation.path.replace(".", "_").split("/") if word]
    return "_".join([operation.method, *(words or ["root"])])
