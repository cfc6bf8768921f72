"""Lists of JSON Schema's keywords, functions that check and read their values, and references
within one schema: by pointer, anchor, `$id` and dynamic scope. SchemaRefused says which place of a
schema is refused, and why. Pure."""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from loraplex.router.shape.texts.pattern import is_count

# Numbers beyond this are not the same in all readers of JSON.
MOST_NUMBER = 2**53
MOST_PLACES = 15
DEEPEST = 64
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_NOT_REFS = "is not supported: use `$ref` and `$defs`"
# Keywords that demand something, with why they are refused.
REFUSED = dict.fromkeys(["$recursiveRef", "$recursiveAnchor"], _NOT_REFS)
# Keywords that demand something. All others are annotations.
BINDING = frozenset(
    ["type", "const", "enum", "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then"]
    + ["else", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
    + ["minLength", "maxLength", "pattern", "format", "items", "prefixItems", "additionalItems"]
    + ["minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"]
    + ["unevaluatedItems", "properties", "patternProperties", "additionalProperties", "required"]
    + ["propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"]
    + ["dependencies", "unevaluatedProperties"]
)
# Shorter words are too often like others.
_LEAST_ALIKE = 6
# Numbers of the drafts that `$schema` names.
DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
NEWEST = 2020
_BARE = re.compile(r"[A-Za-z_$][\w$-]*", re.ASCII)

_ONE = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "contains"),
    *("additionalItems", "unevaluatedItems", "not", "if", "then", "else", "contentSchema"),
)
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = (
    *("properties", "patternProperties", "dependentSchemas", "dependencies"),
    *("$defs", "definitions"),
)
UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")


class SchemaRefused(ValueError):
    """The schema cannot be held to exactly. str() names the place, and says why.

    place: of the schema that is refused, below the caller's field. keyword: "" = the whole.
    """

    def __init__(self, place: str, keyword: str, reason: str) -> None:
        where = below(place, keyword) if keyword else place
        super().__init__(f"`{where}`: {reason}")
        self.place = place
        self.keyword = keyword
        self.reason = reason


def below(place: str, *keys: str | int) -> str:
    """The place of what stands under these keys."""
    for key in keys:
        if isinstance(key, int):
            place += f"[{key}]"
        elif _BARE.fullmatch(key):
            place += f".{key}"
        else:
            place += f"[{json.dumps(_short(key), ensure_ascii=not key.isprintable())}]"
    return place


def _short(key: str) -> str:
    return key if len(key) <= 80 else key[:80] + "…"


def reason_against(keyword: str) -> str | None:
    """Why a keyword that is not known is refused; None for annotations."""
    return None if len(keyword) > _LONGEST else _reason_against(keyword)


@lru_cache(4096)
def _reason_against(keyword: str) -> str | None:
    if keyword in REFUSED:
        return REFUSED[keyword]
    if keyword.startswith("_"):
        return None
    like = next((one for one in sorted(BINDING) if _is_slip(keyword, one)), None)
    return None if like is None else f"is no keyword of JSON Schema: did you mean `{like}`?"


# No longer word is near to one that is known.
_LONGEST = 1 + max(map(len, (*REFUSED, *BINDING)))


def _is_slip(word: str, meant: str) -> bool:
    """Whether one letter is left out, added, other, or of the other case, or two are swapped."""
    if len(meant) < _LEAST_ALIKE or abs(len(word) - len(meant)) > 1:
        return False
    if word.lower() == meant.lower():
        return True
    start = next(n for n, pair in enumerate(zip_longest(word, meant)) if pair[0] != pair[1])
    rest, right = word[start:], meant[start:]
    swapped = right[1:2] + right[:1] + right[2:]
    return rest[1:] in (right, right[1:]) or rest in (right[1:], swapped)


# The functions below raise ValueError, which says what the value must be.


def number(value: Any) -> int | float:
    """Returns the number, a whole one as an int."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not math.isfinite(value) or abs(value) > MOST_NUMBER:
        raise ValueError("numbers beyond ±2^53 are not exact in JSON")
    if value == int(value):
        return int(value)
    exponent = Decimal(repr(value)).as_tuple().exponent
    if isinstance(exponent, int) and exponent < -MOST_PLACES:
        raise ValueError(f"a number has more than {MOST_PLACES} digits after the point")
    return value


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError("must be a whole number")
    if not 0 <= value <= 1_000_000:
        raise ValueError("must lie in 0..1000000")
    return int(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return _encodable(value)


def texts(value: Any) -> list[str]:
    return [text(one) for one in items(value)]


def items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("must be an array")
    return value


def some(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be an array with something in it")
    return value


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    for key in value:
        _encodable(key)
    return value


def types(value: Any) -> list[str]:
    """Returns the named types, without `integer` where `number` is named."""
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not named or any(one not in TYPES for one in named):
        raise ValueError(f"must be one or several of {', '.join(TYPES)}")
    return [t for t in TYPES if t in named and not (t == "integer" and "number" in named)]


def constant(value: Any, depth: int = 0) -> Any:
    """Returns the same JSON value, with whole numbers as ints."""
    if depth > DEEPEST:
        raise ValueError(f"is nested more than {DEEPEST} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, list):
        return [constant(one, depth + 1) for one in value]
    if isinstance(value, dict):
        return {_encodable(key): constant(one, depth + 1) for key, one in value.items()}
    return number(value)


def same_text(value: Any) -> str:
    """A text that is equal for equal JSON values of `constant`, and for no others."""
    return json.dumps(value, sort_keys=True)


def from_text(text: str) -> Any:
    """The value of `same_text`."""
    return json.loads(text)


def _encodable(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("a text has half of a character")
    return value


class Resource:
    """A schema with an address of its own. dynamic: its anchors that the scope may replace."""

    def __init__(self, uri: str, root: Any, place: str, draft: int) -> None:
        self.uri = uri
        self.root = root
        self.place = place
        self.draft = draft
        self.anchors: dict[str, tuple[Any, str]] = {}
        self.dynamic: set[str] = set()


class Spot(NamedTuple):
    """A schema where it stands. scope: addresses of the resources on the way to it, the outermost
    first, where dynamic references need them."""

    schema: Any
    place: str
    resource: Resource
    scope: tuple[str, ...]

    def at(self, *keys: str | int) -> "Spot":
        """The place below these keys, which are there."""
        found = self.schema
        for key in keys:
            found = found[key]
        return self._replace(schema=found, place=below(self.place, *keys))


class Document:
    """One whole schema. param: the caller's field with it. Methods raise SchemaRefused."""

    def __init__(self, schema: Any, param: str) -> None:
        self._param = param
        self._resources: dict[str, Resource] = {}
        self._owner: dict[int, Resource] = {}
        self._draft = NEWEST
        self.has_dynamic = self.has_unevaluated = False
        resource = Resource("", schema, param, self._draft)
        self._walk(Spot(schema, param, resource, ()), 0)
        self.root = self._entered(Spot(schema, param, self._owner.get(id(schema), resource), ()))

    def below(self, spot: Spot, *keys: str | int) -> Spot:
        return self._entered(spot.at(*keys))

    def reference(self, spot: Spot, ref: str, keyword: str) -> Spot:
        """The place that `$ref` names. keyword: the one that holds the reference."""
        address, fragment = urldefrag(ref)
        resource = spot.resource
        if address:
            found = self._resources.get(urljoin(resource.uri, address))
            if found is None:
                reason = "may only name a place in this schema, as `#/...`"
                raise SchemaRefused(spot.place, keyword, reason)
            resource = found
        name = unquote(fragment)
        if name and not name.startswith("/"):
            target = self._anchored(resource, name, spot, keyword == "$dynamicRef")
        else:
            target = self._pointed(resource, name, spot, keyword)
        return self._entered(target)

    def _anchored(self, resource: Resource, name: str, spot: Spot, dynamic: bool) -> Spot:
        if dynamic and name in resource.dynamic:
            scope = (self._resources.get(uri) for uri in spot.scope)
            resource = next((one for one in scope if one and name in one.dynamic), resource)
        if name not in resource.anchors:
            raise SchemaRefused(spot.place, "$ref", "names nothing in this schema")
        schema, place = resource.anchors[name]
        return Spot(schema, place, self._owner.get(id(schema), resource), spot.scope)

    def _pointed(self, resource: Resource, pointer: str, spot: Spot, keyword: str) -> Spot:
        found, place = resource.root, resource.place
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found, place = found[key], below(place, key)
            elif isinstance(found, list) and is_count(key) and int(key) < len(found):
                found, place = found[int(key)], below(place, int(key))
            else:
                raise SchemaRefused(spot.place, keyword, "names nothing in this schema")
            resource = self._owner.get(id(found), resource)
        return Spot(found, place, resource, spot.scope)

    def _entered(self, spot: Spot) -> Spot:
        resource = self._owner.get(id(spot.schema), spot.resource)
        scope = spot.scope
        if self.has_dynamic and resource.uri not in scope:
            scope = (*scope, resource.uri)
        return spot._replace(resource=resource, scope=scope)

    # Names

    def _walk(self, spot: Spot, depth: int) -> None:
        schema = spot.schema
        if not isinstance(schema, dict):
            return
        if depth > DEEPEST:
            reason = f"is nested more than {DEEPEST} deep"
            raise SchemaRefused(spot.place, "", reason)
        resource = self._resource(spot)
        self._owner[id(schema)] = resource
        self.has_unevaluated |= any(keyword in schema for keyword in UNEVALUATED)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = schema.get(keyword)
            if isinstance(name, str):
                resource.anchors[name] = schema, spot.place
                if keyword == "$dynamicAnchor":
                    resource.dynamic.add(name)
                    self.has_dynamic = True
        for keys in parts_of(schema):
            self._walk(spot._replace(resource=resource).at(*keys), depth + 1)

    def _resource(self, spot: Spot) -> Resource:
        """The resource that the schema begins, or else the one around it."""
        schema, resource = spot.schema, spot.resource
        draft = self._draft_of(spot) or resource.draft
        named = schema.get("id" if draft == 4 else "$id")
        is_root = spot.place == self._param
        if isinstance(named, str) and named.startswith("#") and draft < 2019:
            resource.anchors[named[1:]] = schema, spot.place
            named = None
        if not is_root and not isinstance(named, str):
            return resource
        uri = urljoin(resource.uri, urldefrag(named)[0]) if isinstance(named, str) else ""
        found = Resource(uri, schema, spot.place, draft)
        self._resources.setdefault(uri, found)
        if is_root:
            found.anchors = resource.anchors
        return found

    def _draft_of(self, spot: Spot) -> int | None:
        named = spot.schema.get("$schema")
        if named is None:
            return None
        found = DRAFTS.get(named.rstrip("#")) if isinstance(named, str) else None
        if found is None:
            known = ", ".join(DRAFTS)
            raise SchemaRefused(spot.place, "$schema", f"must be one of {known}")
        return found


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """Yields the keys under which a schema has other schemas."""
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict):
            yield (keyword,)
    for keyword in _SEVERAL:
        several = schema.get(keyword)
        for index in range(len(several) if isinstance(several, list) else 0):
            yield keyword, index
    for keyword in _BY_NAME:
        named = schema.get(keyword)
        for name in named if isinstance(named, dict) else ():
            yield keyword, name
