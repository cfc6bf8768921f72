"""Which schemas are held to, and where the others are refused."""

import json
from itertools import pairwise
from typing import Any

import pytest

from router.shape.json_schema import honoured
from router.shape.schema_keywords import SchemaRefused
from tests.router.shape.matching import accepts, matcher_of, writes

DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
CAT, DOG = (
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in ("cat", "dog")
)
LIST = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/a~1b%20c"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}
CLOSED = {"type": "object", "additionalProperties": False}
# Options whose tag has a default, so that none requires it.
ANT, BEE, COW = (
    {**CLOSED, "properties": {"kind": {"const": kind}, "n": {"type": "null"}}, **more}
    for kind, more in (("ant", {}), ("bee", {"required": ["n"]}), ("cow", {"maxProperties": 2}))
)
TAGGED = {"discriminator": {"propertyName": "kind"}}

# A schema, values that it accepts, and values that it does not.
HELD: list[tuple[dict[str, Any] | bool, list[Any], list[Any]]] = [
    (True, [1, {"a": [None]}], []),
    ({"title": "t", "default": 3, "x-order": 1, "$id": "u:v", "examples": [1]}, ["a"], []),
    ({"type": ["integer", "null"]}, [3, -0, None], ["a", 1.5]),
    ({"const": {"é\n": [1, True]}}, [{"é\n": [1, True]}], [{"é\n": [1, 1]}]),
    ({"enum": [1.0, "a", None], "type": ["number", "null"]}, [1, None], ["a", 2]),
    ({"enum": ["a", "ab", "b"], "pattern": "a"}, ["a", "ab"], ["b"]),
    ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": LIST}}, [{"next": {"next": None}}], [{}]),
    ({"$ref": "#it", "$defs": {"a": {"$anchor": "it", "type": "null"}}}, [None], [1]),
    ({"anyOf": [{"type": "null"}, {"items": {"$ref": "#"}, "type": "array"}]}, [[[], None]], [1]),
    ({"oneOf": [CAT, DOG]}, [{"kind": "cat"}, {"kind": "dog"}], [{"kind": "cow"}, {}]),
    (
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        [{"kind": "cat"}, {"kind": "dog"}],
        [{"kind": "cow"}],
    ),
    ({"oneOf": [{"type": "integer", "maximum": 2}, {"exclusiveMinimum": 2, "type": "integer"}]},
     [2, 3], ["a"]),
    ({"oneOf": [ANT, BEE, COW]},
     [{"kind": "ant"}, {"kind": "bee", "n": None}, {"kind": "cow", "n": None}],
     [{}, {"n": None}, {"kind": "bee"}, {"kind": "dog"}]),
    ({**TAGGED, "anyOf": [{"$ref": "#/$defs/a"}, BEE], "$defs": {"a": ANT}, "type": "object"},
     [{"kind": "ant"}, {"kind": "bee", "n": None}], [{}, {"n": None}]),
    ({"anyOf": [ANT, BEE]}, [{}, {"n": None}, {"kind": "ant"}], [{"kind": "dog"}]),
    (
        {
            "items": {"oneOf": [{"$ref": "#/$defs/few"}, COW]},
            "type": "array",
            "$defs": {"few": {"oneOf": [ANT, {"$ref": "#/$defs/bee"}]}, "bee": BEE},
        },
        [[{"kind": "ant"}, {"kind": "bee", "n": None}, {"kind": "cow"}]],
        [[{}], [{"n": None}], [{"kind": "bee"}]],
    ),
    ({"allOf": [CAT, {"properties": {"n": {"type": "null"}}, "required": ["n"]}]},
     [{"kind": "cat", "n": None}], [{"kind": "cat"}, {"n": None}]),
    ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 4}, [2, 3], [1, 4]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.0001, 12345678], [0, -1, 0.00000001]),
    ({"type": "integer", "multipleOf": 3}, [-6, 0, 9], [4]),
    ({**DRAFT_4, "type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2], [1]),
    ({"type": "string", "minLength": 2.0, "maxLength": 3}, ["éé", "abc"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "0000-01-01"]),
    ({"type": "string", "format": "date-time"}, ["2000-02-29T23:59:59Z"], ["1900-02-29T00:00:00Z"]),
    ({"type": "string", "format": "email"}, ["a.b@c-d.e"], ["a@", "a..b@c"]),
    ({"type": "string", "format": "ipv6"}, ["::", "1::2:3", "::1"], ["1::2::3", ":", "1:2"]),
    ({"type": "string", "format": "hostname"}, ["a-b.c"], ["-a", "a" * 64, ".".join(["a"] * 128)]),
    ({"type": "string", "format": "uri"}, ["http://a:80/b?c#d", "urn:x"], ["http//a", "a b:c"]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, [[], [None]], [[1]]),
    ({**DRAFT_7, "items": [{"type": "null"}], "additionalItems": {"const": 1}}, [[None, 1]], [[1]]),
    ({"type": "array", "minItems": 1, "maxItems": 2, "uniqueItems": False},
     [[1, 1]], [[], [1] * 3]),
    ({**CLOSED, "properties": {"": True, '"\\': True}}, [{"": 1, '"\\': 2}, {}], [{"a": 1}]),
    ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"const": 1}},
     [{"a": None, "b": 1}, "text"], [{"a": 1}, {"b": None}]),
    ({"type": "object", "patternProperties": {r"^\d": {"const": 1}}, "additionalProperties": False},
     [{"1a": 1}], [{"1a": 2}, {"a": 1}]),
    ({**CLOSED, "properties": {"a": True, "b": True}, "minProperties": 1},
     [{"a": 1}, {"b": 1}], [{}]),
    ({**CLOSED, "properties": {"a": True, "b": True}, "maxProperties": 1}, [{}, {"b": 1}],
     [{"a": 1, "b": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda value: str(value)[:60])
def test_held(schema: dict[str, Any] | bool, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not writes(schema, value)] == []
    assert [value for value in bad if writes(schema, value)] == []


def test_places_of_spaces() -> None:
    matcher = matcher_of({"type": "object"})
    assert accepts(matcher, '{"a":[1,2], "b": {}}')
    for text in ('{"a":  1}', '{ "a":1}', '{"a":1 }', '{"a":\n1}', ' {"a":1}', '{"a" :1}'):
        assert not accepts(matcher, text)


def test_no_name_hides_behind_an_escape() -> None:
    closed = {"properties": {"a": {"const": 1}}, "patternProperties": {"^b": {"const": 2}}}
    matcher = matcher_of({"type": "object", **closed, "additionalProperties": {"const": 3}})
    assert accepts(matcher, '{"a":1,"b":2,"c":3}')
    assert not accepts(matcher, '{"\\u0061":3}')
    assert not accepts(matcher, '{"\\u0062":3}')


PATTERNS = [
    (r"^[\w.-]+@x$", ["a.b-@x"], ["é@x", "@x"]),
    (r"^\W\D\S$", ["- -"], ["é -", "-1-", "-- ", "-٣-"]),
    (r"^[^\d\s]$", ["a"], ["1", "٣", " ", "\u00a0", "\ufeff"]),
    (r"^.$", ["é", "😀"], ["\n", "\r", "\u2028"]),
    (r"^(a|b){2,3}?$", ["ab", "aba"], ["a"]),
    (r"^\u00e9\x41[a-\u00ff]$", ["éAb"], ["éAĀ"]),
    (r"^[&~]{1,}[\]\[^]$", ["&~^", "&]"], ["&"]),
    (r"a/b|^$", ["xa/bx", ""], ["ab"]),
    (r"^\$\{x\}$", ["${x}"], ["x"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_patterns(pattern: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [value for value in good if not writes(schema, value)] == []
    assert [value for value in bad if writes(schema, value)] == []


REFUSED: list[tuple[Any, str]] = [
    (False, "`schema`: accepts no answer"),
    ([], "`schema`: a schema must be an object or a boolean"),
    ({"not": {}}, "`schema.not`: cannot be held to"),
    ({"items": {"uniqueItems": True}}, "`schema.items.uniqueItems`: cannot be held to"),
    ({"properties": {"a b": {"if": True}}}, '`schema.properties["a b"].if`: cannot be held to'),
    ({"nullable": True}, "`schema.nullable`: is not of JSON Schema"),
    ({"maximun": 1}, "`schema.maximun`: is no keyword"),
    ({"$schema": "http://x"}, "`schema.$schema`: must be one of"),
    ({"type": "text"}, "`schema.type`: must be one or several of null,"),
    ({"minLength": -1}, "`schema.minLength`: must lie in"),
    ({"maximum": 2**53 + 1}, "`schema.maximum`: numbers beyond"),
    ({"maximum": True}, "`schema.maximum`: must be a number"),
    ({"exclusiveMaximum": True}, "`schema.exclusiveMaximum`: must be a number"),
    ({"exclusiveMaximum": 1e-9}, "`schema.exclusiveMaximum`: must lie within"),
    ({"multipleOf": 0.1}, "`schema.multipleOf`: must be a whole number"),
    ({"allOf": [{"multipleOf": n} for n in (3989, 3967, 3947)]},
     "`schema.multipleOf`: its numbers"),
    ({"enum": []}, "`schema.enum`: must be an array with something"),
    ({"enum": ["a", "\x7f"]}, "`schema.enum[1]`: a text has a control character"),
    ({"const": ["\ud800"]}, "`schema.const`: a text has half of a character"),
    ({"format": "int32"}, "`schema.format`: is not one of those"),
    ({"pattern": r"\bx"}, r"`schema.pattern`: `\b` cannot be held to"),
    ({"pattern": "(?=a)"}, "`schema.pattern`: `(?=a`: lookarounds"),
    ({"pattern": "(?<n>a)"}, "`schema.pattern`: `(?<n`: lookarounds"),
    ({"pattern": "a++"}, "`schema.pattern`: a repetition is repeated"),
    ({"pattern": "a{,2}"}, "`schema.pattern`: write a `{`"),
    ({"pattern": "(a"}, "`schema.pattern`: a group is not closed"),
    ({"pattern": "[a"}, "`schema.pattern`: it ends too early"),
    ({"pattern": "[]a]"}, "`schema.pattern`: a class of characters is empty"),
    ({"pattern": "[z-a]"}, "`schema.pattern`: `z-a` is no range"),
    ({"pattern": r"[\d-x]"}, r"`schema.pattern`: write a `-`"),
    ({"pattern": r"\1"}, r"`schema.pattern`: `\1` cannot be held to"),
    ({"patternProperties": {"(": {}}}, '`schema.patternProperties["("]`: a group'),
    ({"patternProperties": {r"\d": {}, "[0-9]": {}}}, "`schema.patternProperties`: two patterns"),
    ({"$ref": "other.json"}, "`schema.$ref`: may only name a place in this schema"),
    ({"$ref": "#/$defs/x"}, "`schema.$ref`: names nothing"),
    ({"anyOf": [True], "items": {"$ref": "#/anyOf/1"}}, "`schema.items.$ref`: names nothing"),
    ({"anyOf": [True], "items": {"$ref": "#/anyOf/" + "9" * 5000}}, "`schema.items.$ref`: names"),
    ({"$ref": "#"}, "`schema`: a `$ref` in it leads back to itself"),
    ({"anyOf": [{"$ref": "#"}, True]}, "`schema`: a `$ref` in it leads back to itself"),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "`schema`: refers to itself so"),
    ({**DRAFT_7, "$ref": "#/definitions/a", "type": "null", "definitions": {"a": {}}},
     "`schema.$ref`: keywords beside it"),
    ({"$defs": {"a": {"$id": "u:v", "title": "a"}}, "$ref": "#/$defs/a"}, "`schema.$defs.a.$id`:"),
    ({"items": [{}]}, "`schema.items`: must be a schema"),
    ({"additionalItems": True}, "`schema.additionalItems`: is not of the draft"),
    ({**DRAFT_7, "prefixItems": [{}]}, "`schema.prefixItems`: is not of the draft"),
    ({"minProperties": 2, "required": []}, "`schema.minProperties`: may be at most 1"),
    ({"properties": {"a": {}}, "maxProperties": 1}, "`schema.maxProperties`: is held to only"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "`schema.oneOf`: options 0 and 1"),
    ({"oneOf": [CAT, {**DOG, "required": []}, CAT]}, "`schema.oneOf`: options 0 and 2"),
    ({"oneOf": [ANT, {"type": "object"}]}, "`schema.oneOf`: options 0 and 1"),
    ({"oneOf": [ANT, {**CLOSED, "properties": {"n": {"type": "null"}}}]},
     "`schema.oneOf`: options 0 and 1"),
    ({**TAGGED, "oneOf": [ANT, {**ANT}]}, "`schema.oneOf`: options 0 and 1"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"contains": {}}}},
     "`schema.$defs.b.contains`: cannot"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(schema: Any, message: str) -> None:
    with pytest.raises(SchemaRefused) as caught:
        honoured(schema, "schema")
    assert str(caught.value).startswith(message)


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = {"items": inner}
    return inner


def test_hostile_schemas_are_refused_soon() -> None:
    many = [f"n{i}" for i in range(2000)]
    hostile: list[Any] = [
        nested(400, {}),
        {"const": json.loads("[" * 400 + "]" * 400)},
        {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in many], "$defs": dict.fromkeys(many, {})},
        {"oneOf": [{"type": "object", "required": ["a"]} for _ in range(3000)]},
        {"pattern": "(" * 100_000},
    ]
    for schema in hostile:
        with pytest.raises(SchemaRefused):
            honoured(schema, "schema")


def test_a_long_chain_of_references() -> None:
    names = [f"n{i}" for i in range(900)]
    links = {n: {"items": {"$ref": f"#/$defs/{after}"}} for n, after in pairwise(names)}
    schema = {"$ref": "#/$defs/n0", "$defs": links | {names[-1]: {}}}
    assert len(honoured(schema, "schema")["$defs"]) == len(names)
