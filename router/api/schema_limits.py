"""Additions to the bodies' JSON schemas that their structs cannot state: limits, names, passes.
Pure."""

from collections.abc import Collection, Iterator
from typing import Any

from loraplex.adapters.chat.conversation import REASONING
from loraplex.adapters.merge.recipe import MAX_MEMBERS, MAX_WEIGHT, SIGN_METHODS, STRATEGIES
from loraplex.router.api.cohere.request import REFUSED as REFUSED_OF_COHERE
from loraplex.router.api.lorax.fields import HARMLESS as HARMLESS_BESIDE
from loraplex.router.api.messages.request import REFUSED as REFUSED_OF_MESSAGES
from loraplex.router.api.messages.tools import REFUSED_OF_TOOL
from loraplex.router.api.openai.chat import OF_ONE
from loraplex.router.api.openai.common import HARMLESS, WHOLE_AT_MINUS_ONE
from loraplex.router.api.request.aliases import aliases_of
from loraplex.router.api.request.fields import SOURCES
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.known_elsewhere import ELSEWHERE, Elsewhere
from loraplex.router.api.responses.request import REFUSED, REFUSED_UNSTORED
from loraplex.router.api.sglang.lmdeploy import HARMLESS as HARMLESS_OF_LMDEPLOY
from loraplex.router.api.sglang.lmdeploy import SHAPES as SHAPES_OF_LMDEPLOY
from loraplex.router.api.sglang.request import HARMLESS as HARMLESS_OF_SGLANG
from loraplex.router.api.vectors.cohere import REFUSED as REFUSED_OF_EMBED
from loraplex.router.api.vectors.cohere import SHAPES as COHERE_SHAPES
from loraplex.router.api.vectors.fields import READ
from loraplex.router.api.vectors.score import SIDES
from loraplex.router.api.vectors.whole import MAX_INPUTS
from loraplex.router.tools.registry import FORMATS

Schema = dict[str, Any]

# Unknown fields are refused unless they are null.
_CLOSED = ("TokenizeBody", "DetokenizeBody", "StreamOptions", "LoraxBody", "LoraxParameters") + (
    *("ResponsesBody", "ResponseStreamOptions", "ReasoningFields", "TextFields", "TextFormat"),
    *("MessagesBody", "CountTokensBody", "MessageMetadata", "ThinkingFields", "OutputFields"),
    *("SglangBody", "SglangSampling", "LmdeployBody", "AbortBody"),
    *("EmbedBody", "EmbedParameters", "LoraxClassifyBody", "LoraxClassifyBatchBody"),
    *("TeiRerankBody", "CohereChatBody"),
)
# Of prompts that are read for numbers.
_INPUT_BODIES = ("EmbeddingsBody", "ClassifyBody", "PoolingBody")
_READ_BODIES = (*_INPUT_BODIES, "ScoreBody", "LabelScoreBody", "RerankBody", "CohereEmbedBody")
_MESSAGES_BODIES = ("MessagesBody", "CountTokensBody")
_OPENAI_BODIES = (
    "ChatBody",
    "BatchChatBody",
    "TokenizeChatBody",
    "TokenizePromptBody",
    "CompletionsBody",
)
_BY_ALIASES = ("ResponsesBody", "SglangBody", "LmdeployBody", "CohereChatBody")
_SIZED = (
    *(*_OPENAI_BODIES, *_MESSAGES_BODIES),
    *("LoraxParameters", "ResponsesBody", "SglangSampling", "LmdeployBody", "CohereChatBody"),
)
# JSON Schema's bound of a field of one type, and the limit that it is.
_BOUNDS = {
    "n": ("integer", "maximum", "max_n"),
    "best_of": ("integer", "maximum", "max_n"),
    "logprobs": ("integer", "maximum", "max_logprobs"),
    "top_logprobs": ("integer", "maximum", "max_logprobs"),
    "prompt_logprobs": ("integer", "maximum", "max_logprobs"),
    "logprob_token_ids": ("array", "maxItems", "max_logprobs"),
    "return_k_alternatives": ("integer", "maximum", "max_logprobs"),
    "top_n_tokens": ("integer", "maximum", "max_logprobs"),
    "top_logprobs_num": ("integer", "maximum", "max_logprobs"),
    "stop": ("array", "maxItems", "max_stop_sequences"),
    "stop_regex": ("array", "maxItems", "max_stop_sequences"),
    "stop_sequences": ("array", "maxItems", "max_stop_sequences"),
    "stop_token_ids": ("array", "maxItems", "max_stop_token_ids"),
    "logit_bias": ("object", "maxProperties", "max_logit_bias"),
    "messages": ("array", "maxItems", "max_messages"),
    "input": ("array", "maxItems", "max_messages"),
}
# Bodies that give a name, and their field for it.
_NAMED = (
    ("RegisterBody", "name"),
    ("LoadLoraBody", "lora_name"),
    ("SglangLoadBody", "lora_name"),
    ("SagemakerBody", "name"),
)
_OFF: Schema = {"enum": [None, False]}
_UNSERVED: dict[str, Schema] = {
    "watermark": _OFF,
    "apply_chat_template": _OFF,
}
_TEXT: Schema = {"type": "string"}
_BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
_NO: Schema = {"type": "null"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKEN_KEY: Schema = {"pattern": "^(0|[1-9][0-9]{0,9})$"}


def say_limits(components: dict[str, Schema], limits: ApiLimits) -> None:
    """components: schemas by name, of msgspec; changed in place."""
    for node in _nodes(components):
        if isinstance(node.get("pattern"), str):  # Python's end of a text; ECMA 262 has no \\Z
            node["pattern"] = node["pattern"].replace(r"\Z", "$")
    for name in (*_CLOSED, *_OPENAI_BODIES, *_READ_BODIES):
        components[name]["additionalProperties"] = {"type": "null"}
    components["UploadForm"]["properties"]["file"] = _BYTES
    for name in _SIZED:
        _say_sizes(components[name]["properties"], limits)
    for name in (*_OPENAI_BODIES, *_READ_BODIES):
        _say_fields(components[name]["properties"])
    _say_reads(components)
    labels = components["LabelScoreBody"]["properties"]["label_token_ids"]
    labels["maxItems"] = limits.max_logprobs
    refused = REFUSED if limits.stores_responses else REFUSED_UNSTORED
    _say_refused(components["ResponsesBody"]["properties"], refused)
    _say_refused(components["CohereChatBody"]["properties"], REFUSED_OF_COHERE)
    for name in _MESSAGES_BODIES:
        _say_refused(components[name]["properties"], REFUSED_OF_MESSAGES)
    _say_sglang(components["SglangBody"], components["SglangSampling"], limits)
    _say_lmdeploy(components["LmdeployBody"])
    components["LoraxBody"]["properties"] |= {field: {} for field in HARMLESS_BESIDE}
    components["LoraxParameters"]["properties"] |= _UNSERVED
    _bound(components["LoraxParameters"]["properties"]["seed"], "integer", maximum=2**64 - 1)
    word = "[A-Za-z0-9][A-Za-z0-9._-]*"
    for name, field in _NAMED:
        components[name]["properties"][field] |= {"pattern": f"^{word}(/{word})?$"}
    formats = {"enum": [None, "auto", *FORMATS]}
    components["RegisterBody"]["properties"]["tool_format"] = formats
    components["CompletionsBody"]["properties"]["prompt"] = _prompts(limits.max_prompts)
    _say_merges(components["MergedAdapters"]["properties"])
    part = components["ContentPart"]
    part["properties"] = {"type": {"const": "text"}, "text": {"type": "string"}}
    part["required"] = ["type", "text"]
    tool = components["OfferedTool"]
    function = next(kind for kind in tool["properties"]["function"]["anyOf"] if "$ref" in kind)
    tool |= {"properties": {"type": {"const": "function"}, "function": function}}
    tool["required"] = ["type", "function"]
    _say_flat_tool(components["FlatTool"])
    _say_messages(components, limits)
    components["Message"] = _message(components["Message"])
    several = components["BatchChatBody"]["properties"]
    several["messages"]["items"] |= {"minItems": 1, "maxItems": limits.max_messages}
    several["messages"]["maxItems"] = limits.max_prompts
    several |= {name: {"enum": [None, *field.neutral]} for name, field in OF_ONE.items()}
    for name in (*_OPENAI_BODIES, *_READ_BODIES, *_MESSAGES_BODIES, *_BY_ALIASES):
        properties = components[name]["properties"]
        properties |= {alias: properties[own] for alias, own in aliases_of(properties).items()}


def _message(message: Schema) -> Schema:
    """Only the assistant may call tools, and have no content beside them."""
    properties = message["properties"]
    spoken = [kind for kind in properties["content"]["anyOf"] if kind.get("type") != "null"]
    for kind in spoken:
        if kind["type"] == "array":
            kind["minItems"] = 1
    content = {"anyOf": spoken}
    others = [role for role in properties["role"]["enum"] if role != "assistant"]
    no_calls: Schema = {"enum": [None, []]}

    def one(needed: str, **changes: Schema) -> Schema:
        required = sorted({"role", needed})
        return message | {"properties": properties | changes, "required": required}

    silent = {"role": {"const": "assistant"}, "content": {"type": "null"}}
    calls = next(kind for kind in properties["tool_calls"]["anyOf"] if kind["type"] == "array")
    return {
        "anyOf": [
            one("content", role={"enum": others}, content=content, tool_calls=no_calls),
            one("content", role={"const": "assistant"}, content=content),
            one("tool_calls", **silent, tool_calls=calls | {"minItems": 1}),
            *(one(name, **silent, **{name: _TEXT}) for name in (*REASONING, "refusal")),
        ]
    }


def _say_merges(properties: dict[str, Schema]) -> None:
    _bound(properties["ids"], "array", minItems=1, maxItems=MAX_MEMBERS)
    _bound(properties["weights"], "array", minItems=1, maxItems=MAX_MEMBERS)
    weight: Schema = {"type": "number", "minimum": -MAX_WEIGHT, "maximum": MAX_WEIGHT}
    properties["weights"]["items"] = weight
    properties["merge_strategy"] = {"enum": [None, *STRATEGIES]}
    properties["majority_sign_method"] = {"enum": [None, *SIGN_METHODS]}


def _say_sizes(properties: dict[str, Schema], limits: ApiLimits) -> None:
    if limits.vocab_size <= limits.max_logprobs:
        for field in WHOLE_AT_MINUS_ONE:
            _bound(properties.get(field, {}), "integer", minimum=-1)
    for field, (kind, bound, limit) in _BOUNDS.items():
        _bound(properties.get(field, {}), kind, **{bound: getattr(limits, limit)})
    _bound(properties.get("logit_bias", {}), "object", propertyNames=_TOKEN_KEY)
    if "adapter_source" in properties:
        properties["adapter_source"] = {"enum": [None, "", *SOURCES]}
    stop = properties["stop"]
    _bound(stop, "string", minLength=1, maxLength=limits.max_stop_chars)
    for schema in _alternatives(stop):
        _bound(schema.get("items", {}), "string", maxLength=limits.max_stop_chars)


def _say_sglang(body: Schema, sampling: Schema, limits: ApiLimits) -> None:
    """A body has one text, or several; or ids in its place."""
    properties = body["properties"]
    properties |= {field: {} for field in HARMLESS_OF_SGLANG}
    for known in (properties, sampling["properties"]):
        _say_elsewhere(known)
    _bound(properties["top_logprobs_num"], "integer", maximum=limits.max_logprobs)
    text, several, ids, lists = _prompts(limits.max_prompts)["anyOf"]
    body["anyOf"] = [
        {
            "required": ["text"],
            "properties": {"text": {"anyOf": [text, several]}, "input_ids": _NO},
        },
        {
            "required": ["input_ids"],
            "properties": {"input_ids": {"anyOf": [ids, lists]}, "text": _NO},
        },
    ]


def _say_lmdeploy(body: Schema) -> None:
    properties = body["properties"]
    properties |= {field: {} for field in HARMLESS_OF_LMDEPLOY}
    _say_elsewhere(properties)
    _bound(properties["input_ids"], "array", minItems=1)
    body["allOf"] = [_only_one(SHAPES_OF_LMDEPLOY)]


def _say_elsewhere(properties: dict[str, Schema]) -> None:
    for field, elsewhere in ELSEWHERE.items():  # what asks for nothing passes
        properties.setdefault(field, {"enum": [None, *elsewhere.neutral]})


def _say_fields(properties: dict[str, Schema]) -> None:
    properties |= {field: {} for field in HARMLESS}
    _say_elsewhere(properties)
    properties["metadata"] = {"type": ["object", "null"]}
    _bound(properties.get("messages", {}), "array", minItems=1)


def _say_flat_tool(tool: Schema) -> None:
    properties = tool["properties"]
    names = [kind for kind in properties["name"]["anyOf"] if kind.get("type") == "string"]
    properties |= {"type": {"const": "function"}, "name": names[0], "tools": _NO}
    tool["required"] = ["type", "name"]


def _say_messages(components: dict[str, Schema], limits: ApiLimits) -> None:
    """Sizes, and what tools may not ask for."""
    _bound(components["Turn"]["properties"]["content"], "array", minItems=1)
    for name in _MESSAGES_BODIES:
        for schema in _alternatives(components[name]["properties"]["stop_sequences"]):
            _bound(schema.get("items", {}), "string", maxLength=limits.max_stop_chars)
    tool = components["InputTool"]
    tool["properties"] |= {"type": {"enum": [None, "custom"]}, "input_schema": {"type": "object"}}
    tool["properties"] |= {
        name: {"enum": [None, *field.neutral]} for name, field in REFUSED_OF_TOOL.items()
    }
    tool["required"] = ["name", "input_schema"]


def _say_refused(properties: dict[str, Schema], refused: dict[str, Elsewhere]) -> None:
    """refused: of the route's own fields."""
    own = dict(properties)
    _say_fields(properties)
    properties |= own
    properties |= {name: {"enum": [None, *field.neutral]} for name, field in refused.items()}


def _say_reads(components: dict[str, Schema]) -> None:
    """One side of each pair, by one name; and where a body has one text or several."""
    for name in _INPUT_BODIES:
        components[name]["properties"]["input"] = _prompts(MAX_INPUTS)
        components[name]["allOf"] = [_only_one(READ)]
    components["EmbedBody"]["properties"]["inputs"] = _prompts(MAX_INPUTS)
    components["EmbedInput"]["properties"]["content"]["minItems"] = 1
    cohere = components["CohereEmbedBody"]
    _say_refused(cohere["properties"], REFUSED_OF_EMBED)
    for name in COHERE_SHAPES:
        _bound(cohere["properties"][name], "array", minItems=1, maxItems=MAX_INPUTS)
    cohere["allOf"] = [_only_one(COHERE_SHAPES)]
    for name in (*_READ_BODIES, "EmbedParameters"):
        components[name]["properties"]["adapter_source"] = {"enum": [None, "", *SOURCES]}
    for name in ("EmbedBody", "LoraxClassifyBody", "LoraxClassifyBatchBody"):
        components[name]["properties"]["stream"] = _OFF
    components["RerankBody"]["properties"]["rank_fields"] = {"enum": [None, [], ["text"]]}
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
    """One kind only: texts, lists of ids, or the ids of a single prompt."""
    text, ids = _TEXT, {"type": "array", "items": _TOKEN_ID, "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [text, several | {"items": text}, ids, several | {"items": ids}]}


def _bound(schema: Schema, kind: str, **bounds: Any) -> None:
    """Of the alternative of this type, if there is one."""
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
