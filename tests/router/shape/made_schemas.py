"""Schemas made over the keywords that are held to, and hard ones made by hand."""

from typing import Any

from hypothesis import strategies as st

from loraplex.router.shape.texts.format import FORMATS

NAMES = st.sampled_from(["a", "b", "kind", "größe", "名前", 'q"\\', "😀", "", "a b", "x1"])
_TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]),
    max_size=6,
)  # fmt: skip
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.integers(-999, 999).map(lambda n: n / 8),
    _TEXTS,
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
_PATTERNS = st.sampled_from(
    [r"^[a-z]{1,5}$", r"\d", r"^\w+-\d{2}$", "^(ab|c)*$", r"^[^\s]{2,4}$", "x.y", r"^\S\W?$", "b$"]
    + [r"^[\u00e0-\u00ff]{1,3}$", r"^\+?[0-9(). -]{3,9}$", "^$|^n/a$", r"^[^\W\d]{1,4}$"]
)
_BOUNDS = st.integers(-1500, 1500) | st.integers(-4000, 4000).map(lambda n: n / 16)


@st.composite
def _strings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["free", "length", "pattern", "format"]))
    schema: dict[str, Any] = {"type": "string", "maxLength": 20}
    if kind == "length":
        least = draw(st.integers(0, 4))
        schema |= {"minLength": least, "maxLength": least + draw(st.integers(0, 6))}
    elif kind == "pattern":
        schema["pattern"] = draw(_PATTERNS)
    elif kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(sorted(FORMATS)))}
    return schema


@st.composite
def _numbers(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    low, high = sorted((draw(_BOUNDS), draw(_BOUNDS)))
    exclusive = draw(st.booleans())
    if draw(st.booleans()):
        schema["exclusiveMinimum" if exclusive else "minimum"] = low
    if draw(st.booleans()):
        schema["exclusiveMaximum" if not exclusive else "maximum"] = high + 2
    if draw(st.integers(0, 4)) == 0:
        schema["multipleOf"] = draw(st.integers(1, 12) | st.sampled_from([0.5, 0.25, 1.5]))
    return schema


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    schema: dict[str, Any] = {"type": "array", "minItems": least}
    schema["maxItems"] = least + draw(st.integers(0, 3))
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, max_size=2))
    schema["items"] = draw(inner)
    return schema


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    named = draw(st.dictionaries(NAMES, inner, max_size=4))
    wanted = draw(st.lists(st.sampled_from(sorted(named)), unique=True)) if named else []
    schema: dict[str, Any] = {"type": "object", "properties": named, "required": wanted}
    other = draw(st.sampled_from(["closed", "open", "some", "patterns"]))
    if other == "closed":
        schema["additionalProperties"] = False
    elif other == "some":
        schema["additionalProperties"] = draw(inner)
    elif other == "patterns":
        schema["patternProperties"] = {"^k": draw(inner), r"\d$": draw(inner)}
        del schema["patternProperties"][draw(st.sampled_from(["^k", r"\d$"]))]
        schema["additionalProperties"] = draw(st.booleans())
    if draw(st.integers(0, 5)) == 0:
        schema["maxProperties"] = len(wanted) + draw(st.integers(0, 2))
    return schema


def _conditional(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({"if": _TESTS}, optional={"then": inner, "else": inner})


_TESTS = st.one_of(
    st.fixed_dictionaries({"const": _VALUES}),
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "array", "object"])}),
    NAMES.map(lambda name: {"required": [name]}),
    st.dictionaries(NAMES, _VALUES.map(lambda value: {"const": value}), max_size=2).map(
        lambda named: {"properties": named}
    ),
)
# What stands beside a schema.
_MORE: dict[str, Any] = {
    "not": lambda _: _TESTS.map(lambda test: {"not": test}),
    "if": _conditional,
    "contains": lambda inner: st.fixed_dictionaries(
        {"contains": st.one_of(_TESTS, inner)},
        optional={"minContains": st.integers(0, 2), "maxContains": st.integers(1, 3)},
    ),
    "unique": lambda _: st.fixed_dictionaries(
        {
            "uniqueItems": st.just(True),
            "items": st.lists(_SCALARS, min_size=1, max_size=5).map(lambda few: {"enum": few}),
        }
    ),
    "dependent": lambda inner: st.fixed_dictionaries(
        {"dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2)},
        optional={"dependentSchemas": st.dictionaries(NAMES, inner, max_size=1)},
    ),
    "names": lambda _: st.fixed_dictionaries(
        {
            "propertyNames": st.one_of(
                _strings(), st.lists(NAMES, min_size=1).map(lambda few: {"enum": few})
            )
        }
    ),
    "unevaluated": lambda inner: st.fixed_dictionaries(
        {}, optional={"unevaluatedProperties": st.booleans(), "unevaluatedItems": inner}
    ),
}


@st.composite
def _joined(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    kinds = ["anyOf", "oneOf", "allOf", "enum", "const", "ref", "beside", *_MORE]
    kind = draw(st.sampled_from(kinds))
    if kind in _MORE:
        return {**draw(inner), **draw(_MORE[kind](inner))}
    if kind == "enum":
        return {"enum": draw(st.lists(_VALUES, min_size=1, max_size=5))}
    if kind == "const":
        return {"const": draw(_VALUES)}
    if kind == "ref":
        return {"$ref": "#/$defs/" + draw(st.sampled_from(["tree", "list", "name"]))}
    if kind == "beside":
        return {**draw(inner), "anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
    return {kind: draw(st.lists(inner, min_size=1, max_size=3))}


_NODES = st.recursive(
    _strings() | _numbers() | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}]),
    lambda inner: _arrays(inner) | _objects(inner) | _joined(inner),
    max_leaves=8,
)
DEFINED = {
    "tree": {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "c": {"$ref": "#/$defs/forest"}},
        "required": ["v"],
        "additionalProperties": False,
    },
    "forest": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    "list": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cell"}]},
    "cell": {"type": "array", "prefixItems": [True, {"$ref": "#/$defs/list"}], "items": False},
    "name": {"type": "string", "minLength": 1, "maxLength": 8},
}
SCHEMAS = _NODES.map(lambda node: node | {"$defs": DEFINED})


def _variant(kind: str, **fields: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


HARD: dict[str, Any] = {
    "anything": True,
    "200 properties": {
        "type": "object",
        "properties": {f"eigenschaft ü{i}": {"type": ["integer", "null"]} for i in range(200)},
        "required": [f"eigenschaft ü{i}" for i in range(0, 200, 2)],
        "additionalProperties": False,
    },
    "enum of 5,000": {"enum": [f"wert {i} é" for i in range(5000)]},
    "enum of 5,000 numbers": {"type": "array", "items": {"enum": list(range(5000))}, "maxItems": 4},
    "recursion": {"$ref": "#/$defs/tree", "$defs": DEFINED},
    "two recursions": {"anyOf": [{"$ref": "#/$defs/list"}, {"$ref": "#/$defs/forest"}],
                       "$defs": DEFINED},
    "variants": {
        "oneOf": [{"$ref": "#/$defs/c"}, _variant("dog", n={"type": "integer"}), {"type": "null"}],
        "$defs": {"c": _variant("cat", lives={"type": "integer", "minimum": 0, "maximum": 9})},
    },
    "variants by default": {
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/c"}, {**_variant("dog"), "required": []}],
        "$defs": {"c": {**_variant("cat", lives={"const": 9}), "required": ["lives"]}},
    },
    "formats": {"type": "object", "required": sorted(FORMATS), "additionalProperties": False,
                "properties": {name: {"type": "string", "format": name} for name in FORMATS}},
    "bounds": {"type": "array", "minItems": 4, "maxItems": 8, "items": {
        "anyOf": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                  {"type": "integer", "minimum": -17, "maximum": 1234},
                  {"type": "number", "minimum": -0.125, "maximum": 99.5},
                  {"type": "integer", "multipleOf": 7, "exclusiveMaximum": 0}]}},
    "names beside patterns": {
        "type": "object", "properties": {"ab": {"type": "integer"}, "x": {"const": "x"}},
        "patternProperties": {"^a": {"minimum": 3}, "^b.*z$": {"type": "null"}},
        "additionalProperties": {"type": "boolean"}, "minProperties": 1, "required": ["ab"]},
    "merged": {"allOf": [
        {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        {"properties": {"a": {"minimum": 2}, "b": {"enum": [1, "é", None]}}, "required": ["b"]},
        {"additionalProperties": {"type": ["number", "string", "null"]}}]},
}  # fmt: skip
