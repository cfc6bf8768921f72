"""Whether no answer keeps to two options of `oneOf`, so that it is `anyOf`. Pure."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from router.shape.schema_keywords import TYPES, SchemaRefused, same_text

_MOST_STEPS = 200_000
_DEEPEST = 12
_TYPE_OF = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}
_TYPE_OF |= {list: "array", dict: "object"}


class Options(NamedTuple):
    """The options of one `oneOf`, as `json_schema` gives them."""

    place: str
    schemas: list[Any]


def check_options(several: Iterable[Options], schemas: Mapping[str, Any]) -> None:
    """schemas: by the `$ref` that names them. Raises SchemaRefused."""
    pairs = _Pairs(schemas)
    for place, options in several:
        for index, one in enumerate(options):
            for other in range(index):
                if not pairs.apart(one, options[other], 0):
                    reason = (
                        f"options {other} and {index} are not known to exclude each other: let a"
                        " required property have other constants in each, or use `anyOf`"
                    )
                    raise SchemaRefused(place, "oneOf", reason)


class _Pairs:
    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._steps = 0

    def apart(self, one: Any, other: Any, depth: int) -> bool:
        """Known to accept nothing in common."""
        self._steps += 1
        if self._steps > _MOST_STEPS or depth > _DEEPEST:
            return False
        if one is False or other is False:
            return True
        if one is True or other is True:
            return False
        return (
            self._part_apart(one, other, depth + 1)
            or self._part_apart(other, one, depth + 1)
            or self._bases_apart(one, other, depth + 1)
        )

    def _part_apart(self, whole: dict[str, Any], other: Any, depth: int) -> bool:
        """By what stands beside the other keywords of `whole`."""
        ref, options = whole.get("$ref"), whole.get("anyOf")
        if ref is not None and self.apart(self._schemas[ref], other, depth):
            return True
        if any(self.apart(part, other, depth) for part in whole.get("allOf", ())):
            return True
        return options is not None and all(self.apart(o, other, depth) for o in options)

    def _bases_apart(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        mine, its = _values(one), _values(other)
        if mine is not None and its is not None:
            return not mine.keys() & its.keys()
        shared = _types(one, mine) & _types(other, its)
        for kind in shared:
            if kind == "number":
                if not _ranges_apart(one, other):
                    return False
            elif kind != "object" or not self._objects_apart(one, other, depth):
                return False
        return True

    def _objects_apart(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        names = dict.fromkeys([*one.get("required", ()), *other.get("required", ())])
        return any(self.apart(_property(one, n), _property(other, n), depth) for n in names)


def _values(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Those of `const` or `enum`, by their text."""
    if "const" in schema:
        return {same_text(schema["const"]): schema["const"]}
    return {same_text(v): v for v in schema["enum"]} if "enum" in schema else None


def _types(schema: dict[str, Any], values: dict[str, Any] | None) -> set[str]:
    named = {"number" if t == "integer" else t for t in schema.get("type", TYPES)}
    return named if values is None else named & {_TYPE_OF[type(v)] for v in values.values()}


def _ranges_apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return _below_all(one, other) or _below_all(other, one)


def _below_all(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether each number of `one` is less than each of `other`."""
    high = one.get("maximum", math.inf)
    over = one.get("exclusiveMaximum", math.inf)
    low = other.get("minimum", -math.inf)
    under = other.get("exclusiveMinimum", -math.inf)
    most, least = min(high, over), max(low, under)
    return bool(most < least or (most == least and (over <= high or under >= low)))


def _property(schema: dict[str, Any], name: str) -> Any:
    """A schema that the property of this name keeps to."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    if "patternProperties" in schema:
        return True
    return schema.get("additionalProperties", True)
