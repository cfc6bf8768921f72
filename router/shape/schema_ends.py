"""Whether answers can end, where schemas name themselves. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from router.shape.schema_keywords import TYPES, SchemaRefused

_MOST_ROUNDS = 100
_NESTED = frozenset({"array", "object"})


def check_ends(schemas: dict[str, Any], place: str) -> None:
    """schemas: by the `$ref` that names them, "#" the whole. Raises SchemaRefused."""
    _check_loops(schemas, place)
    ending: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        before = len(ending)
        for name in reversed(schemas):
            if name not in ending and _ends(schemas[name], ending):
                ending.add(name)
        if len(ending) == before:
            break
    if len(ending) < len(schemas):
        raise SchemaRefused(place, "", "refers to itself so that an answer could not end")


def _check_loops(schemas: Mapping[str, Any], place: str) -> None:
    """A schema that needs itself for the very same value says nothing."""
    left = {name: set(_same_value(schema)) for name, schema in schemas.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    if left:
        raise SchemaRefused(place, "", "a `$ref` in it leads back to itself, with nothing between")


def _same_value(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for part in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
            yield from _same_value(part)


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether some answer ends, if those of the schemas in `ending` do."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if not all(_ends(part, ending) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_ends(option, ending) for option in schema["anyOf"]):
        return False
    if "const" in schema or "enum" in schema:
        return True
    types = set(schema.get("type", TYPES))
    return (
        not types <= _NESTED
        or ("object" in types and _object_ends(schema, ending))
        or ("array" in types and _array_ends(schema, ending))
    )


def _object_ends(schema: dict[str, Any], ending: set[str]) -> bool:
    named, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    free = "patternProperties" in schema
    return all(_ends(named.get(name, free or other), ending) for name in schema.get("required", ()))


def _array_ends(schema: dict[str, Any], ending: set[str]) -> bool:
    first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    more = least > len(first)
    return all(_ends(one, ending) for one in first[:least]) and (
        not more or _ends(schema.get("items", True), ending)
    )
