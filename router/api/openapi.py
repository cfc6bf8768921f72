"""The API's own description (OpenAPI 3.1), made from the structs that read and write it. Pure.

It is of one router: which keys are asked for and what a body may ask for depend on options.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from loraplex.router.api.admin.keys import MAX_LISTED, MOST_BUCKETS, NEWEST_S
from loraplex.router.api.admin.pages import MAX_PAGE
from loraplex.router.api.errors import AnthropicError, Dialect, LoraxError, OpenAIError, error_table
from loraplex.router.api.files_and_batches import MAX_FILES_LISTED
from loraplex.router.api.messages.request import REFUSED_OF_TOOL
from loraplex.router.api.openai.chat import OF_ONE
from loraplex.router.api.openai.common import WHOLE_AT_MINUS_ONE
from loraplex.router.api.operations import OPERATIONS, Operation
from loraplex.router.api.request.chat_messages import PIXELS, TILES
from loraplex.router.api.request.fields import BOUNDS
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.known_elsewhere import ELSEWHERE, Body, Elsewhere, aliases_of
from loraplex.router.api.request.tool_fields import OfferedTool
from loraplex.router.api.responses.request import UNSTORED, ResponsesBody
from loraplex.router.api.sglang.lmdeploy import SHAPES as SHAPES_OF_LMDEPLOY
from loraplex.router.api.vectors.cohere import SHAPES as COHERE_SHAPES
from loraplex.router.api.vectors.fields import MAX_INPUTS, READ
from loraplex.router.api.vectors.fits import SIDES
from loraplex.router.api.vectors.pooled import ClassifyBody, EmbeddingsBody, PoolingBody
from loraplex.router.api.vllm.control import PAUSE_MODES
from loraplex.router.api.vllm.tokens import VOID
from loraplex.router.names.registration import MAX_KEPT

Schema = dict[str, Any]

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
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_TIME: Schema = {"type": "integer", "minimum": 0, "maximum": NEWEST_S}
_BUCKETS: Schema = {"type": "integer", "minimum": 1, "maximum": MOST_BUCKETS}


def _groups(item: str) -> Schema:
    return {"type": "array", "items": {"enum": ["project_id", "api_key_id", item]}}


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
    "keep": {"type": "integer", "minimum": 1, "maximum": MAX_KEPT},
    "replace": {"type": "boolean"},
    "mode": {"enum": [*PAUSE_MODES]},
    "clear_cache": {"type": "boolean"},
    "tenant": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"},
    "start_time": _TIME,
    "end_time": _TIME,
    "bucket_width": {"const": "1d"},
    "page": {"type": "string", "pattern": "^[0-9]{5}$"},
    "limit of /v1/organization/costs": _BUCKETS,
    "limit of /v1/organization/usage/completions": _BUCKETS,
    "group_by of /v1/organization/costs": _groups("line_item"),
    "group_by of /v1/organization/usage/completions": _groups("model"),
    "group_by": _TEXTS,
    "project_ids": _TEXTS,
    "api_key_ids": _TEXTS,
    "models": _TEXTS,
    "search": {"type": "string"},
    "limit of /v1/adapters": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
}
_REQUIRED = ("start_time",)


class Access(msgspec.Struct, frozen=True):
    """The keys that a router asks for: operators' and callers'."""

    operators: bool = True
    callers: bool = True


_KEYED = Access()
_USUAL = ApiLimits()


def openapi_document(
    version: str, access: Access = _KEYED, limits: ApiLimits = _USUAL
) -> dict[str, Any]:
    """The whole document, ready for JSON."""
    types = [OfferedTool, *_ERRORS.values()]
    for operation in OPERATIONS:
        types += [*operation.requests, *operation.answers, *operation.events]
    found = msgspec.json.schema_components(types, ref_template=_REF)
    schemas, components = msgspec.json.decode(msgspec.json.encode(found))  # defaults are tuples
    _say_limits(components, limits)
    # Hashable keys: list[X] is equal to itself, not identical.
    schema_of = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        described = _operation(operation, schema_of, access)
        paths.setdefault(operation.path, {})[operation.method] = described
    if "text" in limits.gives:
        _say_chats(paths["/invocations"]["post"]["requestBody"])
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
            | ({"required": True} if name in _REQUIRED else {})
            for name in operation.query
        ),
    ]
    if parameters:
        described["parameters"] = parameters
    return described


def _say_chats(body: Schema) -> None:
    """Say that a model which writes answers messages that name no task."""
    schema = body["content"]["application/json"]["schema"]
    named = {"required": ["task"], "properties": {"task": {"type": "string", "minLength": 1}}}
    others = {"anyOf": [{"properties": {"messages": _NO}}, named]}
    read = {_REF.format(name=kind.__name__) for kind in (EmbeddingsBody, ClassifyBody, PoolingBody)}
    schema["anyOf"] = [
        {"allOf": [each, others]} if each.get("$ref") in read else each for each in schema["anyOf"]
    ]


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


# Parts of bodies whose unknown fields are refused unless they are null; so are all bodies'.
_CLOSED = (
    *("StreamOptions", "LoraxParameters", "SglangSampling", "EmbedParameters"),
    "TokensSampling",
    *("ResponseStreamOptions", "ReasoningFields", "TextFields", "TextFormat"),
    *("MessageMetadata", "ThinkingFields", "OutputFields"),
)
_BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
_NO: Schema = {"type": "null"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKEN_KEY: Schema = {"pattern": "^(0|[1-9][0-9]{0,9})$"}


def _say_limits(components: dict[str, Schema], limits: ApiLimits) -> None:
    """Add what structs cannot state: options' bounds, names, fields that pass. components: schemas
    by name, of msgspec; changed in place."""
    for node in _nodes(components):
        if isinstance(node.get("pattern"), str):  # Python's end of a text; ECMA 262 has no \\Z
            node["pattern"] = node["pattern"].replace(r"\Z", "$")
        if {"enum", "anyOf"} <= node.keys():  # the values say the type, too
            del node["anyOf"], node["default"]
    for name in _CLOSED:
        components[name]["additionalProperties"] = _NO
    components["UploadForm"]["properties"]["file"] = _BYTES
    for name in ("LoraxParameters", "SglangSampling", "TokensSampling"):
        _say_bounds(components[name]["properties"], limits)
    for name, void in (("SglangSampling", ()), ("TokensSampling", VOID)):
        sampling = components[name]
        passing = _neutral(ELSEWHERE) | dict.fromkeys(void, {})
        sampling["properties"] = passing | sampling["properties"]
    for kind in {kind for operation in OPERATIONS for kind in operation.requests}:
        _say_body(components[kind.__name__], kind, limits)
    _say_reads(components)
    _say_generate(components, limits)
    components["CompletionsBody"]["properties"]["prompt"] = _prompts(limits.max_prompts)
    part = components["ContentPart"]
    part["properties"] = {"type": {"const": "text"}, "text": _TEXT}
    part["required"] = ["type", "text"]
    shown = components["MessagePart"]
    address = {"anyOf": [{"$ref": "#/components/schemas/ImageUrl"}, _TEXT]}
    picture = {"type": {"const": "image_url"}, "image_url": address}
    of_url = components["ImageUrl"]["properties"]
    of_url |= dict.fromkeys(TILES, {"type": "null"})
    shown["properties"] = {name: of_url[name] for name in PIXELS}
    shown["required"] = ["type"]
    shown["anyOf"] = [
        {"properties": part["properties"], "required": part["required"]},
        {"properties": picture, "required": ["type", "image_url"]},
    ]
    _say_tools(components)
    forms = components["StructuredOutputs"]["properties"]
    forms["disable_additional_properties"] = {"enum": [None, False]}
    components["Message"] = _message(components["Message"])
    several = components["BatchChatBody"]["properties"]
    several["messages"]["items"] |= {"minItems": 1, "maxItems": limits.max_messages}
    several["messages"]["maxItems"] = limits.max_prompts
    several |= _neutral(OF_ONE)


def _say_body(body: Schema, kind: type[msgspec.Struct], limits: ApiLimits) -> None:
    """Say options' bounds, and which fields pass unread."""
    body.setdefault("additionalProperties", _NO)
    properties: dict[str, Schema] = body["properties"]
    _say_bounds(properties, limits)
    body_of = kind if issubclass(kind, Body) else Body
    unread: dict[str, Schema] = dict.fromkeys(body_of.harmless, {})
    if "metadata" in unread:
        unread["metadata"] = {"type": ["object", "null"]}
    if issubclass(kind, Body):
        unread = _neutral(ELSEWHERE) | unread
    for name, schema in unread.items():
        properties.setdefault(name, schema)
    properties |= _neutral(body_of.refused)
    if kind is ResponsesBody and not limits.stores_responses:
        properties |= _neutral(UNSTORED)
    aliases = aliases_of(properties)
    for own in {*aliases.values()}.intersection(body.get("required", ())):
        _say_needed(body, [own, *(alias for alias, meant in aliases.items() if meant == own)])
    properties |= {alias: properties[own] for alias, own in aliases.items()}


def _say_needed(body: Schema, names: list[str]) -> None:
    """Say that a field is needed by one of its names. By the others the field may be null. names:
    its own first."""
    needed = body["properties"][names[0]]
    body["required"] = [name for name in body["required"] if name != names[0]]
    body["anyOf"] = [{"required": [name], "properties": {name: needed}} for name in names]
    body["properties"][names[0]] = {"anyOf": [needed, _NO]}


def _neutral(fields: Mapping[str, Elsewhere]) -> dict[str, Schema]:
    """Describes refused fields: they may have only the values that ask for nothing."""
    return {name: {"enum": [None, *field.neutral]} for name, field in fields.items()}


def _message(message: Schema) -> Schema:
    """Says that only the assistant may call tools, and that other people's content is not empty."""
    properties = message["properties"]
    kinds = properties["content"]["anyOf"]
    spoken = [
        kind | {"minItems": 1} if kind["type"] == "array" else kind
        for kind in kinds
        if kind["type"] != "null"
    ]
    other = properties["role"] | {"not": {"enum": ["assistant", "tool", "function"]}}
    no_calls: Schema = {"enum": [None, []]}

    def one(*needed: str, **changes: Schema) -> Schema:
        required = ["role", *needed]
        return message | {"properties": properties | changes, "required": required}

    results = one(role={"const": "tool"}, tool_calls=no_calls)
    older = one("name", role={"const": "function"}, tool_calls=no_calls, name=_TEXT)
    return {
        "anyOf": [
            one("content", role=other, content={"anyOf": spoken}, tool_calls=no_calls),
            one(role={"const": "assistant"}),
            results,
            older,
        ]
    }


def _say_bounds(properties: dict[str, Schema], limits: ApiLimits) -> None:
    if limits.vocab_size <= limits.max_logprobs:
        for field in WHOLE_AT_MINUS_ONE:
            _bound(properties.get(field, {}), "integer", minimum=-1)
    for field, bound in BOUNDS.items():
        schema, most = properties.get(field, {}), getattr(limits, bound.most)
        least = {"minItems": bound.least} if bound.least else {}
        if bound.things:
            _bound(schema, "array", maxItems=most, **least)
            _bound(schema, "object", maxProperties=most)
        else:
            _bound(schema, "integer", maximum=most)
        if bound.longest:
            longest = getattr(limits, bound.longest)
            _bound(schema, "string", minLength=1, maxLength=longest)
            for kind in _alternatives(schema):
                _bound(kind.get("items", {}), "string", maxLength=longest)
    _bound(properties.get("logit_bias", {}), "object", propertyNames=_TOKEN_KEY)


def _say_generate(components: dict[str, Schema], limits: ApiLimits) -> None:
    """Say that SGLang's body has one text, or several; or ids in its place. LMDeploy's has one."""
    text, several, ids, lists = _prompts(limits.max_prompts)["anyOf"]
    components["SglangBody"]["anyOf"] = [
        {
            "required": [name],
            "properties": {name: {"anyOf": kinds}, other: _NO},
        }
        for name, other, kinds in (
            ("text", "input_ids", [text, several]),
            ("input_ids", "text", [ids, lists]),
        )
    ]
    components["LmdeployBody"]["allOf"] = [_only_one(SHAPES_OF_LMDEPLOY)]
    components["LoraxBody"]["properties"]["options"] = {}


def _say_tools(components: dict[str, Schema]) -> None:
    """Say what tools may not ask for."""
    tool = components["OfferedTool"]
    function = next(kind for kind in tool["properties"]["function"]["anyOf"] if "$ref" in kind)
    tool |= {"properties": {"type": {"const": "function"}, "function": function}}
    tool["required"] = ["function"]
    call = components["MessageToolCall"]
    called = next(kind for kind in call["properties"]["function"]["anyOf"] if "$ref" in kind)
    call["properties"] |= {"type": {"not": {"const": "custom"}}, "function": called}
    call["required"] = ["function"]
    tool = components["FlatTool"]
    properties = tool["properties"]
    names = [kind for kind in properties["name"]["anyOf"] if kind.get("type") == "string"]
    properties |= {"type": {"const": "function"}, "name": names[0], "tools": _NO}
    tool["required"] = ["type", "name"]
    tool = components["InputTool"]
    tool["properties"] |= {"type": {"enum": [None, "custom"]}, "input_schema": {"type": "object"}}
    tool["properties"] |= _neutral(REFUSED_OF_TOOL)
    tool["required"] = ["name", "input_schema"]


def _say_reads(components: dict[str, Schema]) -> None:
    """Say one side of each pair, by one name; and where a body has one text or several."""
    for name in ("EmbeddingsBody", "ClassifyBody", "PoolingBody"):
        components[name]["properties"]["input"] = _prompts(MAX_INPUTS)
        components[name]["allOf"] = [_only_one(READ)]
    components["EmbedBody"]["properties"]["inputs"] = _prompts(MAX_INPUTS)
    components["CohereEmbedBody"]["allOf"] = [_only_one(COHERE_SHAPES)]
    components["ScoreBody"]["allOf"] = [_only_one(names) for names in SIDES]


def _only_one(names: Collection[str]) -> Schema:
    return {
        "anyOf": [
            {
                "required": [name],
                "properties": {name: {"not": _NO}} | {x: _NO for x in names if x != name},
            }
            for name in names
        ]
    }


def _prompts(most: int) -> Schema:
    """Prompts, all of one kind: texts, lists of ids, or the ids of a single prompt."""
    text, ids = _TEXT, {"type": "array", "items": _TOKEN_ID, "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [text, several | {"items": text}, ids, several | {"items": ids}]}


def _bound(schema: Schema, kind: str, **bounds: Any) -> None:
    """Bounds the alternative of this type, if there is one."""
    for alternative in _alternatives(schema):
        if alternative.get("type") == kind:
            alternative |= bounds


def _alternatives(schema: Schema) -> list[Schema]:
    found: list[Schema] = schema.get("anyOf", [schema])
    return found


def _nodes(value: Any) -> Iterator[Schema]:
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from _nodes(child)
    elif isinstance(value, list):
        for child in value:
            yield from _nodes(child)
