"""Rewrites JSON schemas for llguidance; what llguidance would not enforce exactly is refused. Pure.

What comes out has only keywords that llguidance honours, in an order that it reads rightly.
Answers are on one line, with at most one space after a comma and a colon. Properties come in the
schema's order. No `\\u` escapes are written, since a name could hide behind one.
"""

import math
from typing import Any, NamedTuple
from urllib.parse import unquote

from router.shape import schema_keywords as keywords
from router.shape.schema_ends import check_ends
from router.shape.schema_format import FORMATS
from router.shape.schema_keywords import SchemaRefused, below
from router.shape.schema_options import Options, check_options
from router.shape.schema_pattern import PatternRefused, is_count, portable
from router.shape.schema_tags import Tags

WRITING = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
_MOST_REFS = 1_000
# An exclusive bound and six digits after the point never round to the bound itself.
_PLACES, _MOST_EXCLUSIVE = 6, 10**9
_MOST_MULTIPLE = 4_000
_IN_PLACE = ("const", "enum", "$ref", "allOf", "anyOf", "oneOf")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip


def honoured(schema: dict[str, Any] | bool, param: str) -> dict[str, Any]:
    """What llguidance is to read, whose answers the schema accepts.

    param: the caller's field with the schema, which errors name. Raises SchemaRefused.
    """
    return _Reader(schema, param).read()


class _Target(NamedTuple):
    """A schema that a `$ref` names. having: as of `_Node`."""

    schema: Any
    place: str
    having: tuple[str, ...]


class _Reader:
    def __init__(self, schema: Any, param: str) -> None:
        self._root = schema
        self._param = param
        self.draft = keywords.NEWEST
        self._names: dict[tuple[str, tuple[str, ...]], str] = {("#", ()): "#"}
        self._waiting: list[tuple[str, _Target]] = []
        self.options: list[Options] = []
        self.tags = Tags(self._follow)
        # Of the numbers in the schema; and whether one value may have to keep to several.
        self.multiples: set[int] = {1}
        self.has_places = self.joins = False

    def read(self) -> dict[str, Any]:
        if isinstance(self._root, dict):
            self.draft = self._draft_of(self._root)
        whole = self.schema(self._root, self._param, 0)
        if whole is False:
            raise SchemaRefused(self._param, "", "accepts no answer")
        root: dict[str, Any] = {} if whole is True else whole
        schemas: dict[str, Any] = {"#": root}
        while self._waiting:
            name, target = self._waiting.pop()
            schemas[name] = self.schema(target.schema, target.place, 0, target.having)
        self._check_multiples()
        check_options(self.options, schemas)
        check_ends(schemas, self._param)
        root = {"x-guidance": WRITING, **root}
        defs = {name.removeprefix("#/$defs/"): s for name, s in schemas.items() if name != "#"}
        return root | {"$defs": defs} if defs else root

    def _check_multiples(self) -> None:
        """llguidance multiplies them in 32 bits."""
        scale = 10**_PLACES if self.has_places else 1
        most = math.lcm(*self.multiples) * max(self.multiples) * scale
        if self.joins and len(self.multiples) > 2 and most >= 2**32:
            reason = "its numbers are too large to be held to together"
            raise SchemaRefused(self._param, "multipleOf", reason)

    def _draft_of(self, schema: dict[str, Any]) -> int:
        named = schema.get("$schema")
        if named is None:
            return keywords.NEWEST
        found = keywords.DRAFTS.get(named.rstrip("#")) if isinstance(named, str) else None
        if found is None:
            known = ", ".join(keywords.DRAFTS)
            raise SchemaRefused(self._param, "$schema", f"must be one of {known}")
        return found

    def schema(
        self, schema: Any, place: str, depth: int, having: tuple[str, ...] = ()
    ) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaRefused(place, "", "a schema must be an object or a boolean")
        if depth > keywords.DEEPEST:
            raise SchemaRefused(place, "", f"is nested more than {keywords.DEEPEST} deep")
        self._check_keywords(schema, place)
        return _Node(self, schema, place, depth, having).read()

    def _check_keywords(self, schema: dict[str, Any], place: str) -> None:
        for keyword, value in schema.items():
            if keyword in _KNOWN or (keyword == "uniqueItems" and value is False):
                continue
            if keyword in ("$id", "id"):
                if place != self._param:
                    raise SchemaRefused(place, keyword, "only the whole schema may have one")
            elif keyword == "$schema":
                if place != self._param and value != self._root.get("$schema"):
                    raise SchemaRefused(place, keyword, "must be that of the whole schema")
            elif (reason := keywords.reason_against(keyword)) is not None:
                raise SchemaRefused(place, keyword, reason)

    def reference(self, ref: str, place: str, having: tuple[str, ...]) -> str:
        """A `$ref` to the schema that this one names. having: as of `_Node`."""
        if not ref.startswith("#"):
            raise SchemaRefused(place, "$ref", "may only name a place in this schema, as `#/...`")
        key = unquote(ref), having
        if key not in self._names:
            if len(self._names) > _MOST_REFS:
                raise SchemaRefused(place, "$ref", "the schema has too many references")
            schema, where = self._target(key[0], place)
            name = f"#/$defs/s{len(self._names)}"
            self._names[key] = name
            self._waiting.append((name, _Target(schema, where, having)))
        return self._names[key]

    def _follow(self, ref: str) -> Any:
        """What it names in this schema, None where there is nothing."""
        try:
            return self._target(unquote(ref), self._param)[0] if ref.startswith("#") else None
        except SchemaRefused:
            return None

    def _target(self, pointer: str, place: str) -> tuple[Any, str]:
        """The schema and its place."""
        if not pointer.startswith("#/"):
            return self._anchored(pointer[1:], place)
        found, where = self._root, self._param
        for part in pointer[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found, where = found[key], below(where, key)
            elif isinstance(found, list) and is_count(key) and int(key) < len(found):
                found, where = found[int(key)], below(where, int(key))
            else:
                raise SchemaRefused(place, "$ref", "names nothing in this schema")
        return found, where

    def _anchored(self, name: str, place: str) -> tuple[Any, str]:
        for key in ("$defs", "definitions"):
            named = self._root.get(key)
            for stem, schema in named.items() if isinstance(named, dict) else ():
                if isinstance(schema, dict) and schema.get("$anchor") == name:
                    return schema, below(self._param, key, stem)
        raise SchemaRefused(place, "$ref", "names nothing in `$defs`")


class _Node:
    """One schema with its keywords, as it is read.

    having: properties that answers must have wherever the schema names them: they distinguish the
    options of unions around it.
    """

    def __init__(
        self,
        reader: _Reader,
        schema: dict[str, Any],
        place: str,
        depth: int,
        having: tuple[str, ...],
    ) -> None:
        self._reader = reader
        self._schema = schema
        self._place = place
        self._depth = depth
        self._having = having
        self._all: list[Any] = []

    def read(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if "type" in self._schema:
            out["type"] = self._value("type", keywords.types)
        for keyword in _COUNTS:
            if keyword in self._schema:
                out[keyword] = self._value(keyword, keywords.count)
        out |= self._numbers(out.get("type"))
        out |= self._string()
        out |= self._array()
        out |= self._object()
        self._check_size(out)
        out |= self._in_place(bool(out))
        if self._all:
            out["allOf"] = self._all
        return out

    def _refuse(self, keyword: str, reason: str) -> SchemaRefused:
        return SchemaRefused(self._place, keyword, reason)

    def _value(self, keyword: str, read: Any) -> Any:
        try:
            return read(self._schema[keyword])
        except ValueError as error:
            raise self._refuse(keyword, str(error)) from None

    def _below(self, schema: Any, *keys: str | int) -> dict[str, Any] | bool:
        return self._reader.schema(schema, below(self._place, *keys), self._depth + 1)

    def _options(self, keyword: str) -> list[dict[str, Any] | bool]:
        """Of `allOf` or of a union. Those of a union have the tag that distinguishes them."""
        having, options = self._having, self._some(keyword)
        if keyword != "allOf" and (tag := self._reader.tags.missing(self._schema, keyword)):
            having = tuple(dict.fromkeys((*having, tag)))
        places = [below(self._place, keyword, index) for index in range(len(options))]
        return [
            self._reader.schema(option, place, self._depth + 1, having)
            for option, place in zip(options, places, strict=True)
        ]

    def _numbers(self, types: list[str] | None) -> dict[str, Any]:
        out = {}
        for keyword in _NUMBERS:
            old = keyword.startswith("exclusive") and isinstance(self._schema.get(keyword), bool)
            if keyword in self._schema and not old:
                out[keyword] = self._value(keyword, keywords.number)
        self._old_exclusive(out)
        if "multipleOf" in out:
            self._check_multiple(out["multipleOf"])
        whole = types is not None and "number" not in types
        if not whole and "multipleOf" not in out:
            for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
                if keyword in out:
                    self._check_exclusive(keyword, out[keyword])
                    out["multipleOf"] = 10**-_PLACES
                    self._reader.has_places = True
        return out

    def _old_exclusive(self, out: dict[str, Any]) -> None:
        """Draft 4: a boolean beside the bound."""
        for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            value = self._schema.get(keyword)
            if not isinstance(value, bool):
                continue
            if self._reader.draft > 4:
                raise self._refuse(keyword, "must be a number")
            if value and bound in out:
                out[keyword] = out.pop(bound)

    def _check_multiple(self, value: int | float) -> None:
        if not isinstance(value, int) or not 0 < value <= _MOST_MULTIPLE:
            reason = f"must be a whole number in 1..{_MOST_MULTIPLE}; readers round fractions"
            raise self._refuse("multipleOf", reason)
        self._reader.multiples.add(value)

    def _check_exclusive(self, keyword: str, value: int | float) -> None:
        if abs(value) > _MOST_EXCLUSIVE or round(value, _PLACES) != value:
            reason = f"must lie within ±10^9, with {_PLACES} digits after the point at most"
            raise self._refuse(keyword, f"{reason}, or `type` be integer")

    def _string(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if "pattern" in self._schema:
            out["pattern"] = self._pattern(self._value("pattern", keywords.text), "pattern")
        if "format" in self._schema:
            found = FORMATS.get(self._value("format", keywords.text))
            if found is None:
                known = ", ".join(FORMATS)
                raise self._refuse("format", f"is not one of those that are held to: {known}")
            whole = {"pattern": f"^(?:{found.pattern})$"}
            self._all.append(whole if found.most is None else whole | {"maxLength": found.most})
        return out

    def _pattern(self, pattern: str, *keys: str) -> str:
        try:
            return portable(pattern)
        except PatternRefused as error:
            raise SchemaRefused(below(self._place, *keys), "", str(error)) from None

    def _array(self) -> dict[str, Any]:
        schema = self._schema
        out: dict[str, Any] = {}
        first, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            first, rest = "items", "additionalItems"
        old = self._reader.draft < 2020
        for keyword in ("prefixItems", "additionalItems"):
            if keyword in schema and old is (keyword == "prefixItems"):
                raise self._refuse(keyword, "is not of the draft that `$schema` names")
        if first == "items" and not old:
            raise self._refuse("items", "must be a schema: use `prefixItems` for several")
        if first in schema:
            several = self._value(first, keywords.items)
            out["prefixItems"] = [self._below(one, first, n) for n, one in enumerate(several)]
        if rest in schema:
            out["items"] = self._below(schema[rest], rest)
        return out

    def _object(self) -> dict[str, Any]:
        schema = self._schema
        out: dict[str, Any] = {}
        if "properties" in schema:
            named = self._value("properties", keywords.mapping)
            out["properties"] = {k: self._below(s, "properties", k) for k, s in named.items()}
        if "patternProperties" in schema:
            out["patternProperties"] = self._patterned()
        if "additionalProperties" in schema:
            other = schema["additionalProperties"]
            out["additionalProperties"] = self._below(other, "additionalProperties")
        if "required" in schema:
            out["required"] = list(dict.fromkeys(self._value("required", keywords.texts)))
        missing = [name for name in self._having if name in out.get("properties", {})]
        if missing:
            out["required"] = list(dict.fromkeys((*out.get("required", ()), *missing)))
        return out

    def _patterned(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, schema in self._value("patternProperties", keywords.mapping).items():
            pattern = self._pattern(key, "patternProperties", key)
            if pattern in out:
                raise self._refuse("patternProperties", "two patterns match the same names")
            out[pattern] = self._below(schema, "patternProperties", key)
        return out

    def _check_size(self, out: dict[str, Any]) -> None:
        """llguidance counts names, and does not know whether two free ones are the same."""
        required = out.get("required", [])
        least, most = out.get("minProperties", 0), out.get("maxProperties")
        if least > len(required) + 1:
            reason = f"may be at most {len(required) + 1} here: one more than `required` names"
            raise self._refuse("minProperties", reason)
        optional = out.get("properties", {}).keys() - set(required)
        if not optional or (least <= len(required) and most is None):
            return
        closed = out.get("additionalProperties") is False and "patternProperties" not in out
        if not closed or (most is not None and most != len(required) + 1):
            keyword = "minProperties" if most is None else "maxProperties"
            reason = "is held to only where `required` names all of `properties`"
            raise self._refuse(keyword, reason)

    def _in_place(self, has_more: bool) -> dict[str, Any]:
        schema = self._schema
        out: dict[str, Any] = {}
        self._reader.joins |= has_more and any(k in schema for k in _IN_PLACE[2:])
        self._reader.joins |= "allOf" in schema
        if "const" in schema:
            out["const"] = self._value("const", keywords.constant)
        if "enum" in schema:
            out["enum"] = [self._constant(n, one) for n, one in enumerate(self._some("enum"))]
        if "$ref" in schema:
            if self._reader.draft < 2019 and (has_more or any(k in schema for k in _IN_PLACE[:2])):
                raise self._refuse("$ref", "keywords beside it mean nothing in this draft")
            ref = self._value("$ref", keywords.text)
            out["$ref"] = self._reader.reference(ref, self._place, self._having)
        if "allOf" in schema:
            self._all += self._options("allOf")
        if "anyOf" in schema:
            out["anyOf"] = self._options("anyOf")
        if "oneOf" in schema:
            options = self._options("oneOf")
            self._reader.options.append(Options(self._place, options))
            self._all.append({"anyOf": options})
        return out

    def _some(self, keyword: str) -> list[Any]:
        found: list[Any] = self._value(keyword, keywords.some)
        return found

    def _constant(self, index: int, value: Any) -> Any:
        try:
            return keywords.constant(value)
        except ValueError as error:
            raise SchemaRefused(below(self._place, "enum", index), "", str(error)) from None


_KNOWN = frozenset(
    (*_COUNTS, *_NUMBERS, *_IN_PLACE, "type", "pattern", "format", "prefixItems", "items")
) | {"additionalItems", "properties", "patternProperties", "additionalProperties", "required"}
