"""Resolves references within one schema: by pointer, anchor, `$id` and dynamic scope. Pure."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from loraplex.router.shape.schema import keywords
from loraplex.router.shape.schema.keywords import SchemaRefused, below
from loraplex.router.shape.texts.pattern import is_count

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
        self._draft = keywords.NEWEST
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
        if depth > keywords.DEEPEST:
            reason = f"is nested more than {keywords.DEEPEST} deep"
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
        found = keywords.DRAFTS.get(named.rstrip("#")) if isinstance(named, str) else None
        if found is None:
            known = ", ".join(keywords.DRAFTS)
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
