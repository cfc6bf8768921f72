"""Fields that ask for a form of the answer, by the names of every server: one Shape. Pure."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from loraplex.router.api.request.body import decode_plain, require
from loraplex.router.api.request.known_elsewhere import check_unknown_parts
from loraplex.router.call import RequestError
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

MAX_CHOICES = 8192
MAX_TAGS = 512
_GBNF = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t\r\n]*::=", re.M)
# Whitespace of JSON, how often it comes, and groups.
_WHITESPACE = re.compile(r"(?:[ \n\t\r\[\](){}?*+|,]|\\[nrt]|\{[0-9]{0,3}(?:,[0-9]{0,3})?\})*")
_TYPES = ("text", "json_object", "json_schema", "json", "regex", "grammar", "structural_tag")


class StructuredOutputs(msgspec.Struct, frozen=True):
    """Forms of an answer as vLLM says them: one of the forms, and how JSON may be written."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


def only_shape(shapes: Iterable[Shape | None]) -> Shape | None:
    """Returns the one form that is asked for, if any. Raises RequestError for two that differ."""
    asked = [shape for shape in shapes if shape is not None]
    for other in asked[1:]:
        is_same = _nameless(other) == _nameless(asked[0])
        require(is_same, f"asks for another form than `{asked[0].param}`", other.param)
    return asked[0] if asked else None


def check_ends(shape: Shape | None, ignores_ends: bool, param: str) -> None:
    """Checks that an answer with a form may end: else it keeps to none. Raises RequestError."""
    if shape is not None:
        require(not ignores_ends, f"the form of `{shape.param}` has an end", param)


def format_shape(given: dict[str, Any] | None, param: str) -> Shape | None:
    """Reads the form of an answer: `response_format` as OpenAI, LoRAX and TGI have it, or TGI's
    `grammar`. Raises RequestError.

    A schema is kept to whether or not it is `strict`.
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    if not given:
        return None
    kind = given.get("type")
    known = isinstance(kind, str) and kind in _TYPES
    require(known, f"expected one of {', '.join(_TYPES)}", f"{param}.type")
    if kind == "structural_tag":
        return _tags(given, param)
    if kind == "json_schema" and "json_schema" in given:
        return _named_schema(given, param, "json_schema")
    field = _value_field(given, param)
    where = f"{param}.{field}"
    value = given.get(field)
    if kind == "json_object":
        return AnyJson(param) if value in (None, {}) else json_of(value, where)
    if kind == "text":
        require(value is None, "a text has no form", where)
        return None
    require(value is not None, "is needed", where)
    if kind == "json_schema":
        is_named = isinstance(value, dict) and "schema" in value
        return _named_schema(given, param, field) if is_named else json_of(value, where)
    if kind == "json":
        return json_of(value, where)
    require(isinstance(value, str), "expected `string`", where)
    return regex_of(value, where) if kind == "regex" else grammar_of(value, where)


def _value_field(given: dict[str, Any], param: str) -> str:
    """Finds by which name the form stands in a field."""
    usual = {"regex": "regex", "grammar": "grammar", "json_schema": "json_schema"}
    names = ("schema", "value", usual.get(given["type"], "schema"))
    said = [name for name in dict.fromkeys(names) if given.get(name) is not None]
    check_unknown_parts(given, ("type", *names), f"{param}.")
    for other in said[1:]:
        require(False, f"give it or `{said[0]}`, not both", f"{param}.{other}")
    return said[0] if said else names[-1]


def _named_schema(given: dict[str, Any], param: str, field: str) -> Shape | None:
    check_unknown_parts(given, ("type", field), f"{param}.")
    where = f"{param}.{field}"
    named = given[field]
    require(isinstance(named, dict), "expected `object`", where)
    check_unknown_parts(named, ("name", "description", "schema", "strict"), f"{where}.")
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        right = isinstance(named.get(name), kind | None)
        require(right, f"expected `{kind.__name__}`", f"{where}.{name}")
    require(named.get("schema") is not None, "is needed", f"{where}.schema")
    return json_of(named["schema"], f"{where}.schema")


def structured_shapes(given: StructuredOutputs | None) -> list[Shape | None]:
    if given is None:
        return []
    where = "structured_outputs"
    require(
        not given.disable_additional_properties,
        "not supported: say `additionalProperties` in the schema",
        f"{where}.disable_additional_properties",
    )
    spaces = whitespace_of(given.whitespace_pattern, f"{where}.whitespace_pattern")
    if given.disable_any_whitespace:
        require(not spaces, "contradicts `whitespace_pattern`", f"{where}.disable_any_whitespace")
        spaces = ""
    json = [
        json_of(given.json, f"{where}.json", spaces),
        AnyJson(f"{where}.json_object", spaces) if given.json_object else None,
    ]
    require(
        any(json) or given.whitespace_pattern is None,
        f"needs `{where}.json`",
        f"{where}.whitespace_pattern",
    )
    return [
        *json,
        regex_of(given.regex, f"{where}.regex"),
        choice_of(given.choice, f"{where}.choice"),
        grammar_of(given.grammar, f"{where}.grammar"),
        _tags(given.structural_tag, f"{where}.structural_tag"),
    ]


def json_of(given: Any, param: str, whitespace: str | None = None) -> Shape | None:
    if given is None:
        return None
    schema = _object(given, param) if isinstance(given, str) else given
    require(isinstance(schema, dict | bool), "expected a JSON schema", param)
    return JsonSchema(schema, param, whitespace)


def _object(text: str, param: str) -> dict[str, Any]:
    """Reads an object that is JSON within JSON."""
    try:
        return decode_plain(text.encode())
    except RequestError as error:
        raise RequestError("invalid", f"`{param}`: {error.message}", param=param) from None


def regex_of(pattern: str | None, param: str) -> Shape | None:
    return None if pattern is None else Regex(pattern, param)


def choice_of(texts: list[str] | None, param: str) -> Shape | None:
    if texts is None:
        return None
    size = len(texts)
    require(0 < size <= MAX_CHOICES, f"expected 1 to {MAX_CHOICES} texts, got {size}", param)
    return Choice(tuple(texts), param)


def grammar_of(source: str | None, param: str) -> Shape | None:
    if source is None:
        return None
    return Grammar(source, "gbnf" if _GBNF.search(source) else "lark", param)


def _tags(given: dict[str, Any] | str | None, param: str) -> Shape | None:
    if given is None:
        return None
    plain = _object(given, param) if isinstance(given, str) else given
    check_unknown_parts(plain, ("type", "structures", "triggers"), f"{param}.")
    structures, triggers = plain.get("structures"), plain.get("triggers")
    for name, value in (("structures", structures), ("triggers", triggers)):
        is_list = isinstance(value, list) and 0 < len(value) <= MAX_TAGS
        require(is_list, f"expected a list of 1 to {MAX_TAGS}", f"{param}.{name}")
    assert structures is not None
    assert triggers is not None
    for i, trigger in enumerate(triggers):
        is_text = isinstance(trigger, str) and trigger
        require(is_text, "expected a text that is not empty", f"{param}.triggers[{i}]")
    tags = tuple(_tag(one, f"{param}.structures[{i}]") for i, one in enumerate(structures))
    return StructuralTag(tags, tuple(triggers), param)


def _tag(given: Any, param: str) -> Tag:
    require(isinstance(given, dict), "expected `object`", param)
    check_unknown_parts(given, ("begin", "schema", "end"), f"{param}.")
    for name in ("begin", "end"):
        require(isinstance(given.get(name), str), "expected `string`", f"{param}.{name}")
    schema = given.get("schema")
    require(isinstance(schema, dict | bool), "expected a JSON schema", f"{param}.schema")
    return Tag(given["begin"], schema, given["end"])


def whitespace_of(pattern: str | None, param: str) -> str | None:
    """A grammar's pattern of whitespace. Raises RequestError for one that lets more through."""
    if pattern is None:
        return None
    spelled = pattern.replace(r"\s", r"[ \n\r\t]")
    require(_WHITESPACE.fullmatch(spelled), "expected a pattern of JSON's whitespace", param)
    return spelled


def _nameless(shape: Shape) -> Shape:
    return msgspec.structs.replace(shape, param="")
