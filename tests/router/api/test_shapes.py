"""Which form each server's fields ask for."""

import json
from typing import Any

import pytest

from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.openai import chat as openai_chat
from loraplex.router.api.openai import completions as openai_completions
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import GenerationCall, RequestError
from loraplex.router.shape.shape import (
    AnyJson,
    Choice,
    Grammar,
    JsonSchema,
    Regex,
    Shape,
    StructuralTag,
    Tag,
)

LIMITS = ApiLimits()
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
LARK = 'start: "a"'
GBNF = 'root ::= "a"'
TAG = {"begin": "<f>", "schema": OBJECT, "end": "</f>"}
TAGS = {"structures": [TAG], "triggers": ["<f"]}
NAMED = {"name": "n", "schema": OBJECT}


def chat(**fields: Any) -> GenerationCall:
    body = {"model": "", "messages": [{"role": "user", "content": "hi"}], **fields}
    return openai_chat.parse(json.dumps(body).encode(), LIMITS).call


def completion(**fields: Any) -> GenerationCall:
    body = {"model": "", "prompt": "hi", **fields}
    return openai_completions.parse(json.dumps(body).encode(), LIMITS).call


def generate(**fields: Any) -> GenerationCall:
    body = {"inputs": "hi", "parameters": fields}
    return lorax.parse(json.dumps(body).encode(), LIMITS).call


def schema(param: str, whitespace: str | None = None) -> JsonSchema:
    return JsonSchema(OBJECT, param, whitespace)


FORMATS: list[tuple[Any, Shape | None]] = [
    (None, None),
    ({}, None),
    ({"type": "text"}, None),
    ({"type": "json_object"}, AnyJson("F")),
    ({"type": "json_object", "schema": {}}, AnyJson("F")),
    ({"type": "json_object", "schema": OBJECT}, schema("F.schema")),
    ({"type": "json_object", "schema": json.dumps(OBJECT)}, schema("F.schema")),
    ({"type": "json_object", "value": OBJECT}, schema("F.value")),
    ({"type": "json", "value": OBJECT}, schema("F.value")),
    ({"type": "json_schema", "value": NAMED}, schema("F.value.schema")),
    ({"type": "json_schema", "json_schema": NAMED}, schema("F.json_schema.schema")),
    (
        {"type": "json_schema", "json_schema": NAMED | {"strict": True}},
        schema("F.json_schema.schema"),
    ),
    (
        {"type": "json_schema", "json_schema": NAMED | {"strict": None}},
        schema("F.json_schema.schema"),
    ),
    ({"type": "json_schema", "schema": OBJECT}, schema("F.schema")),
    ({"type": "regex", "value": "a+"}, Regex("a+", "F.value")),
    ({"type": "regex", "regex": "a+"}, Regex("a+", "F.regex")),
    ({"type": "grammar", "grammar": GBNF}, Grammar(GBNF, "gbnf", "F.grammar")),
    (
        {"type": "structural_tag", **TAGS},
        StructuralTag((Tag("<f>", OBJECT, "</f>"),), ("<f",), "F"),
    ),
]


def at(shape: Shape | None, name: str) -> str:
    return repr(shape).replace("param='F", f"param='{name}")


@pytest.mark.parametrize(("given", "shape"), FORMATS)
def test_response_format(given: Any, shape: Shape | None) -> None:
    for call in (chat, completion, generate):
        assert repr(call(response_format=given).shape) == at(shape, "response_format")
    assert repr(generate(grammar=given).shape) == at(shape, "grammar")


OUTPUTS: list[tuple[dict[str, Any], Shape | None]] = [
    ({}, None),
    ({"json": None, "disable_fallback": True, "json_object": False}, None),
    ({"json": OBJECT}, schema("S.json")),
    ({"json": json.dumps(OBJECT)}, schema("S.json")),
    ({"json": OBJECT, "disable_any_whitespace": True}, schema("S.json", "")),
    ({"json": OBJECT, "whitespace_pattern": r"[\n ]?"}, schema("S.json", r"[\n ]?")),
    ({"json_object": True, "whitespace_pattern": r"\s*"}, AnyJson("S.json_object", r"[ \n\r\t]*")),
    ({"regex": "a"}, Regex("a", "S.regex")),
    ({"choice": ["a", "b"]}, Choice(("a", "b"), "S.choice")),
    ({"grammar": LARK}, Grammar(LARK, "lark", "S.grammar")),
    ({"grammar": GBNF}, Grammar(GBNF, "gbnf", "S.grammar")),
    (
        {"structural_tag": json.dumps({"type": "structural_tag", **TAGS})},
        StructuralTag((Tag("<f>", OBJECT, "</f>"),), ("<f",), "S.structural_tag"),
    ),
]


@pytest.mark.parametrize(("given", "shape"), OUTPUTS)
def test_structured_outputs(given: dict[str, Any], shape: Shape | None) -> None:
    for call in (chat, completion):
        found = repr(call(structured_outputs=given).shape)
        assert found == repr(shape).replace("param='S", "param='structured_outputs")


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"guided_json": OBJECT}, schema("guided_json")),
        ({"guided_json": json.dumps(OBJECT)}, schema("guided_json")),
        (
            {"guided_json": OBJECT, "guided_whitespace_pattern": " ?"},
            schema("guided_json", " ?"),
        ),
        ({"guided_json_object": True}, AnyJson("guided_json_object")),
        ({"guided_json_object": False}, None),
        ({"guided_regex": "a"}, Regex("a", "guided_regex")),
        ({"guided_choice": ["a"]}, Choice(("a",), "guided_choice")),
        ({"guided_grammar": LARK}, Grammar(LARK, "lark", "guided_grammar")),
        ({"guided_decoding_backend": "xgrammar:no-fallback"}, None),
        ({"json_schema": json.dumps(OBJECT)}, schema("json_schema")),
        ({"regex": "a"}, Regex("a", "regex")),
        ({"ebnf": GBNF}, Grammar(GBNF, "gbnf", "ebnf")),
        (
            {
                "guided_decoding_backend": "guidance",
                "guided_grammar": LARK,
                "structured_outputs": {"grammar": LARK},
            },
            Grammar(LARK, "lark", "structured_outputs.grammar"),
        ),
        ({"regex": "a", "guided_regex": "a"}, Regex("a", "guided_regex")),
    ],
)
def test_other_names(fields: dict[str, Any], shape: Shape | None) -> None:
    for call in (chat, completion):
        assert call(**fields).shape == shape


def test_words_and_tokens() -> None:
    call = chat(allowed_token_ids=[5, 3, 5], bad_words=["no", "never"])
    assert call.sampling.allowed_token_ids == (3, 5)
    assert call.bad_words == ("no", "never")
    assert call.shape is None


REGEX = {"type": "regex", "value": "a"}
JSON = {"type": "json_object"}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": ["json"]}}, "response_format.type"),
    ({"response_format": {"schema": OBJECT}}, "response_format.type"),
    ({"response_format": {"type": "json"}}, "response_format.schema"),
    ({"response_format": {"type": "json", "value": 5}}, "response_format.value"),
    ({"response_format": {"type": "json", "value": "{"}}, "response_format.value"),
    ({"response_format": {"type": "text", "value": "a"}}, "response_format.value"),
    ({"response_format": {"type": "regex"}}, "response_format.regex"),
    ({"response_format": {"type": "regex", "value": {}}}, "response_format.value"),
    ({"response_format": JSON | {"strict": True}}, "response_format.strict"),
    ({"response_format": JSON | {"schema": OBJECT, "value": {}}}, "response_format.value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": []}},
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": "x"}}},
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED | {"x": 1}}},
        "response_format.json_schema.x",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
    (
        {"response_format": {"type": "structural_tag", **TAGS, "triggers": [""]}},
        "response_format.triggers[0]",
    ),
    (
        {"response_format": {"type": "structural_tag", **TAGS, "structures": [{"begin": "a"}]}},
        "response_format.structures[0].end",
    ),
]
OPENAIS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    (
        {"structured_outputs": {"json": OBJECT, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    (
        {"structured_outputs": {"json": OBJECT, "whitespace_pattern": "[a-z]*"}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_choice": ["a"] * 9000}, "guided_choice"),
    ({"guided_regex": "a", "response_format": JSON}, "guided_regex"),
    ({"guided_regex": "a", "guided_json": OBJECT}, "guided_regex"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"regex": "a", "ignore_eos_token": True}, "ignore_eos_token"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 257}, "bad_words"),
    ({"bad_words": ["a" * 2000]}, "bad_words"),
]
LORAXS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": JSON, "grammar": REGEX}, "grammar.value"),
    ({"grammar": REGEX, "ignore_eos_token": True}, "ignore_eos_token"),
    ({"grammar": {"type": "json"}}, "grammar.schema"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH + OPENAIS)
def test_what_openais_routes_refuse(fields: dict[str, Any], param: str) -> None:
    for call in (chat, completion):
        with pytest.raises(RequestError) as caught:
            call(**fields)
        assert caught.value.param == param
        assert param in caught.value.message


@pytest.mark.parametrize(("fields", "param"), BOTH + LORAXS)
def test_what_loraxs_routes_refuse(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        generate(**fields)
    assert caught.value.param == param
