"""Which schemas are held to, and where the others are refused."""

import json
from itertools import pairwise
from typing import Any

import pytest

from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema import keywords
from loraplex.router.shape.schema.json_rules import as_far_as_held, json_grammar
from loraplex.router.shape.schema.keywords import SchemaRefused
from loraplex.router.shape.texts import pattern
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
    ({"anyOf": [{"type": "null"}, {"items": {"$ref": "#"}, "type": "array"}]}, [[[], None]],
     [1, [1]]),
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
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, [[], [None]],
     [[1], [None, 1]]),
    ({**DRAFT_7, "items": [{"type": "null"}], "additionalItems": {"const": 1}}, [[None, 1]],
     [[1], [None, 2]]),
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
    # Annotations
    ({"nullable": True, "javaType": "x", "readonly": 1, "_minLength": 9, "typo": [], "itms": 1},
     ["a"], []),
    ({"type": "string", "format": "int32"}, ["a"], []),
    # Numbers
    ({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 99}, [0.07, 99], [0.001]),
    ({"type": "integer", "not": {"const": 5}}, [4, 6], [5]),
    ({"not": {"type": "integer"}}, [1.5, "a", []], [1]),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [1.5], [1]),
    # Texts
    ({"const": "a\u0000\x1f"}, ["a\0\x1f"], ["a"]),
    ({"type": "string", "not": {"enum": ["ab", ""]}, "maxLength": 2}, ["a", "b"], ["", "ab"]),
    ({"type": "string", "not": {"pattern": "^a"}}, ["b", ""], ["a", "ab", 1]),
    ({"type": "string", "pattern": "(^a|b)$"}, ["a", "xb"], ["xa"]),
    # Types and constants
    ({"not": {"type": ["string", "null"]}}, [1, [], {}], ["a", None]),
    ({"not": {"enum": [True, [1], {"a": 1}]}}, [False, [2], [1, 1], {"a": 2}, {}, {"a": 1, "b": 1}],
     [True, [1], {"a": 1}]),
    ({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "else": True,
      "required": ["a"], "type": "object"},
     [{"a": 1, "b": 2}, {"a": 2}], [{"a": 1}]),
    ({"oneOf": [CAT, {**DOG, "required": []}, CAT]}, [{"kind": "dog"}, {}], [{"kind": "cat"}]),
    ({"oneOf": [ANT, {**CLOSED, "properties": {"n": {"type": "null"}}}]}, [{"kind": "ant"}],
     [{"n": 1}]),
    # Arrays
    ({"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True, "minItems": 2},
     [[1, "a"], [None, "a", 1]], [[], [1], [1, 1], ["a", 1, "a"]]),
    ({"type": "array", "items": {"enum": ["abc", "d"]}, "uniqueItems": True,
      "maxItems": 1}, [[], ["d"]], [["d", "abc"]]),
    ({"type": "array", "contains": {"const": 5}, "minContains": 2, "maxContains": 3},
     [[5, 5], [1, 5, 2, 5], [5, 5, 5, 1]], [[], [5], [5, 1], [5, 5, 5, 5]]),
    ({"type": "array", "contains": {"type": "null"}, "minItems": 2, "maxItems": 2},
     [[None, 1], [1, None]], [[1, 2], [None], [None, 1, 1]]),
    ({"not": {"contains": {"const": 1}}}, [[2], []], [1, [1], [2, 1]]),
    ({"prefixItems": [{"type": "null"}], "unevaluatedItems": False}, [[], [None]],
     [[None, 1], [1]]),
    ({"contains": {"const": 1}, "unevaluatedItems": {"const": 2}}, [[1], [2, 1]], [[1, 3]]),
    # Objects
    ({**CLOSED, "dependentRequired": {"a": ["b"]}, "properties": {"a": True, "b": True}},
     [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"dependentSchemas": {"a": {"maxProperties": 1}}}, [{"a": 1}, {"b": 1, "c": 1}],
     [{"a": 1, "b": 1}]),
    ({**DRAFT_7, "dependencies": {"a": ["b"], "b": {"properties": {"c": False}}}},
     [{"a": 1, "b": 1}, {"c": 1}], [{"a": 1}, {"b": 1, "c": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, [{}, {"a": 1, "b": 2}],
     [{"c": 1}, {"ab": 1}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ({"properties": {"a": {}}, "maxProperties": 1}, [{"a": 1}, {"b": 1}, 3], [{"a": 1, "b": 1}]),
    ({**CLOSED, "properties": dict.fromkeys("abcd", {}), "minProperties": 2, "maxProperties": 3},
     [{"a": 1, "d": 1}, {"b": 1, "c": 1, "d": 1}], [{"a": 1}, dict.fromkeys("abcd", 1)]),
    ({"patternProperties": {r"\d": {"type": "null"}, "[0-4]$": {"const": None}}},
     [{"1": None}], [{"1": 1}, {"9": 1}]),
    ({**CLOSED, "patternProperties": {"^a$": {}, "^b": {"const": 1}}, "properties": {"a": {}}},
     [{"a": 1}, {"b": 1, "bb": 1}], [{"c": 1}, {"b": 2}]),
    ({**CLOSED, "patternProperties": {"^a$": {"const": 1}}, "properties": {"a": {}},
      "required": ["a"]}, [{"a": 1}], [{}, {"a": 2}, {"a": 1, "b": 1}]),
    ({"not": {"additionalProperties": {"const": 1}}}, [{"a": 2}, {"b": 1, "a": 3}], [{}, {"a": 1}]),
    ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, 3]),
    ({**CLOSED, "properties": {"a": {"allOf": [{"pattern": "^x"}, {"pattern": "^y"}]},
      "b": False}}, [{}, {"a": 1}], [{"a": "x"}, {"b": 1}]),
    ({"properties": {"a": True}, "unevaluatedProperties": False,
      "anyOf": [{"properties": {"b": {"const": 1}}}, {"maxProperties": 1}]},
     [{"a": 1}, {"a": 1, "b": 1}], [{"c": 1}, {"b": 2}]),
    # References
    ({"$defs": {"a": {"$id": "u:v", "type": "null"}}, "$ref": "u:v"}, [None], [1]),
    ({"$id": "http://x/a", "items": {"$ref": "b#/$defs/c"}, "type": "array",
      "$defs": {"b": {"$id": "b", "$defs": {"c": {"$anchor": "d", "type": "null"}}}}},
     [[None]], [[1]]),
    ({**DRAFT_4, "id": "http://x/a", "definitions": {"b": {"id": "b", "type": "null"}},
      "$ref": "b"}, [None], [1]),
    ({"$id": "http://x/list", "$ref": "tree", "$defs": {
        "item": {"$dynamicAnchor": "item", "type": "integer"},
        "tree": {"$id": "tree", "type": "array", "items": {"$dynamicRef": "#item"},
                 "$defs": {"any": {"$dynamicAnchor": "item"}}}}}, [[1]], [["a"]]),
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
    ({"not": {}}, "`schema`: accepts no answer"),
    ({"allOf": [True, False]}, "`schema`: accepts no answer"),
    ({**CLOSED, "required": ["zz"]}, "`schema.required`: names `zz`, which `additionalProp"),
    ({"items": {"uniqueItems": True}}, "`schema.items.uniqueItems`: is held to only where items"),
    ({"uniqueItems": True, "prefixItems": [{"const": 1}]}, "`schema.uniqueItems`: is held to on"),
    ({"uniqueItems": 1}, "`schema.uniqueItems`: must be true or false"),
    ({"properties": {"a b": {"$recursiveRef": "#"}}},
     '`schema.properties["a b"].$recursiveRef`: is not supported'),
    ({"not": {"uniqueItems": True}}, "`schema.not`: arrays with equal items cannot be demanded"),
    ({"not": {"multipleOf": 3}}, "`schema.not`: numbers that are no multiples"),
    ({"not": {"type": "integer"}, "minimum": 2}, "`schema`: numbers that are not whole have no"),
    ({"allOf": [{"contains": {"const": n}} for n in range(4)]},
     "`schema.allOf[0].contains`: is held to at most three times"),
    ({"dependentRequired": {"a": 1}}, "`schema.dependentRequired`: must have arrays of names"),
    ({"patternProperties": {f"{n}.*x": {"const": n} for n in range(9)}},
     "`schema.patternProperties`: its p"),
    ({"unevaluatedItems": False, "anyOf": [{"minItems": n} for n in range(6)]},
     "`schema.anyOf`: has more than 5 options beside"),
    ({"maximun": 1}, "`schema.maximun`: is no keyword of JSON Schema: did you mean `maximum`?"),
    ({"$schema": "http://x"}, "`schema.$schema`: must be one of"),
    ({"type": "text"}, "`schema.type`: must be one or several of null,"),
    ({"minLength": -1}, "`schema.minLength`: must lie in"),
    ({"maximum": 2**53 + 1}, "`schema.maximum`: numbers beyond"),
    ({"maximum": True}, "`schema.maximum`: must be a number"),
    ({"exclusiveMaximum": True}, "`schema.exclusiveMaximum`: must be a number"),
    ({"exclusiveMaximum": 1e-9}, "`schema.exclusiveMaximum`: must lie within"),
    ({"multipleOf": 1e-7}, "`schema.multipleOf`: must be at most 4000, or that with 6 digits"),
    ({"multipleOf": 0}, "`schema.multipleOf`: must be above 0"),
    ({"allOf": [{"multipleOf": n} for n in (3989, 3967, 3947)]},
     "`schema.allOf[0].multipleOf`: must be at most 4000"),
    ({"enum": []}, "`schema.enum`: must be an array with something"),
    ({"const": ["\ud800"]}, "`schema.const`: a text has half of a character"),
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
    ({"$ref": "other.json"}, "`schema.$ref`: may only name a place in this schema"),
    ({"$ref": "#/$defs/x"}, "`schema.$ref`: names nothing"),
    ({"anyOf": [True], "items": {"$ref": "#/anyOf/1"}}, "`schema.items.$ref`: names nothing"),
    ({"anyOf": [True], "items": {"$ref": "#/anyOf/" + "9" * 5000}}, "`schema.items.$ref`: names"),
    ({"$ref": "#"}, "`schema`: a `$ref` in it leads back to itself"),
    ({"anyOf": [{"$ref": "#"}, True]}, "`schema`: a `$ref` in it leads back to itself"),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "`schema`: refers to itself so"),
    ({**DRAFT_7, "$ref": "#/definitions/a", "type": "null", "definitions": {"a": {}}},
     "`schema.$ref`: keywords beside it"),
    ({"items": [{}]}, "`schema.items`: must be a schema"),
    ({"additionalItems": True}, "`schema.additionalItems`: is not of the draft"),
    ({**DRAFT_7, "prefixItems": [{}]}, "`schema.prefixItems`: is not of the draft"),
    ({"minProperties": 2, "required": []}, "`schema.minProperties`: may be at most 1"),
    ({"oneOf": [{"type": "array"}, {"type": "array", "uniqueItems": True}]},
     "`schema.oneOf`: options 0 and 1 are not known to exclude each other"),
    ({**TAGGED, "oneOf": [ANT, {**ANT}]}, "`schema.required`: names `kind`"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"contains": 1}}},
     "`schema.$defs.b.contains`: a schema must be"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(schema: Any, message: str) -> None:
    with pytest.raises(SchemaRefused) as caught:
        json_grammar(Lark(), schema)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("names", "is_held"),
    [
        ({}, True),
        ({"pattern": "^x-"}, True),
        ({"pattern": "^(a|b+)[0-9]*$"}, True),
        ({"not": {"enum": ["a", "b"]}}, True),
        ({"pattern": "^[a-z]{2}$"}, False),
        ({"pattern": "^x|y$"}, False),
        ({"maxLength": 9}, False),
    ],
)
def test_many_members_whose_names_are_free(names: dict[str, Any], is_held: bool) -> None:
    """Of names that never run out, where each comes once."""
    schema = {"properties": {"a": {}}, "propertyNames": names, "minProperties": 4}
    writer = Lark()
    writer.names_once = True
    if is_held:
        assert json_grammar(writer, schema)
        assert writer.has_free_names
    else:
        with pytest.raises(SchemaRefused, match="minProperties"):
            json_grammar(writer, schema)


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = {"items": inner}
    return inner


def test_hostile_schemas_are_refused_soon() -> None:
    many = [f"n{i}" for i in range(2000)]
    hostile: list[Any] = [
        nested(400, {}),
        {"const": json.loads("[" * 400 + "]" * 400)},
        {"anyOf": [{"properties": {name: {}}} for name in many]},
        {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in "abc"]} for n in range(40)]},
        {"oneOf": [{"type": "object", "required": ["a"]} for _ in range(3000)]},
        {"pattern": "(" * 100_000},
    ]
    for schema in hostile:
        with pytest.raises(SchemaRefused):
            json_grammar(Lark(), schema)


def test_patterns_that_no_question_could_pay_for_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = list[int]()
    monkeypatch.setattr(pattern, "_read", lambda text, for_certain: read.append(len(text)))
    schemas: list[dict[str, Any]] = [
        {"pattern": "ab" * 70_000},
        {"patternProperties": {"ab" * 70_000: {}}},
    ]
    for schema in schemas:
        with pytest.raises(SchemaRefused, match="patterns cost too much"):
            json_grammar(Lark(), schema)
    assert not read


def test_what_is_kept_of_schemas_is_bounded_in_bytes() -> None:
    size = pattern._kept.cache_info().currsize
    assert writes({"pattern": "^(" + "a" * 1100 + "|b)$"}, "b")
    assert pattern._kept.cache_info().currsize == size
    size = keywords._reason_against.cache_info().currsize
    assert writes({"x-" + "a" * 1100: 1}, "b")
    assert keywords._reason_against.cache_info().currsize == size


def test_a_long_chain_of_references() -> None:
    names = [f"n{i}" for i in range(900)]
    links = {n: {"items": {"$ref": f"#/$defs/{after}"}} for n, after in pairwise(names)}
    schema = {"$ref": "#/$defs/n0", "$defs": links | {names[-1]: {}}}
    assert json_grammar(Lark(), schema)


SLIPS = [
    "minlength",
    "minLenght",
    "require",
    "requiredd",
    "Required",
    "patern",
    "additionalPropertie",
]
WORDS = ["_required", "readonly", "itmes", "kinds", "x-pattern", "maximumLength", "name", "enums"]


def test_only_slips_of_long_words_are_refused() -> None:
    for word in SLIPS:
        with pytest.raises(SchemaRefused, match="did you mean"):
            json_grammar(Lark(), {word: 1})
    for word in WORDS:
        assert writes({word: 1}, "a")


def test_lenient_schemas_bind_as_far_as_they_can() -> None:
    ids = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"ids": ids, "n": {"minimun": 3, "type": "integer"}},
        "not": {"properties": {"ids": {"items": {"pattern": "(?=a)"}}}},
    }
    held, unbound = as_far_as_held(schema, "p")
    assert set(unbound) == {"p.properties.ids.uniqueItems", "p.properties.n.minimun", "p.not"}
    assert writes(held, {"ids": ["a", "a"], "n": 1})
    assert not writes(held, {"ids": ["a", "a", "a"]})
    assert not writes(held, {"n": "a"})
    assert as_far_as_held({"type": 3, "allOf": [False]}, "p") == ({"type": "object"}, ("p",))
