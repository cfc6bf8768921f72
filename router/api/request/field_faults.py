"""msgspec's validation errors of plain values as text for callers. Pure."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

# Of a value that a message quotes.
_MOST_SHOWN = 80
_PLACE = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"(\w+)|\[[^\]]*\]")
_PATTERN = re.compile(r"matching regex '\^(?P<form>.*)\\\\Z'", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_NO_CHOICE = re.compile(r"Invalid enum value (?P<got>.*)", re.DOTALL)
_OTHER_TYPE = re.compile(r"Expected `.*`, got (?P<got>`\w+`)")


class FieldFault(msgspec.Struct, frozen=True):
    """field: where it is, as `versions[0].weight`; "" = the whole."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"`{self.field}`: {self.message}" if self.field else self.message


def field_fault(error: msgspec.ValidationError, kind: Any) -> FieldFault:
    """The field, what is wrong with it, and what it may be. kind: what was expected as a whole."""
    found = _PLACE.fullmatch(str(error))
    what, path = (found["what"], found["path"]) if found else (str(error), "")
    unknown, missing = _UNKNOWN.fullmatch(what), _MISSING.fullmatch(what)
    if unknown is not None:
        known = ", ".join(_fields_at(kind, path)) or "none"
        message = f"unknown field; known: {known}"
        return FieldFault(_joined(path, unknown["name"][:_MOST_SHOWN]), message)
    if missing is not None:
        return FieldFault(_joined(path, missing["name"]), "is needed")
    key = "a key: " if found and found["key"] else ""
    return FieldFault(path, key + (_choices(what, kind, path) or _words(what)))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _words(what: str) -> str:
    """msgspec's own, as they go on behind a field's name."""
    return _PATTERN.sub(r"of the form \g<form>", what[:1].lower() + what[1:])


def _choices(what: str, kind: Any, path: str) -> str | None:
    """Where one of a few values was expected: which, and what came."""
    types = [one for one in _types_at(kind, path) if not isinstance(one, inspect.NoneType)]
    values = [v for one in types if isinstance(one, inspect.LiteralType) for v in one.values]
    none_else = all(isinstance(one, inspect.LiteralType) for one in types)
    fault = _NO_CHOICE.fullmatch(what) or (_OTHER_TYPE.fullmatch(what) if none_else else None)
    if fault is None or not values:
        return None
    got = fault["got"]
    if len(got) > _MOST_SHOWN:
        got = f"{got[:_MOST_SHOWN]}…"
    return f"expected one of {', '.join(map(str, values))}; got {got}"


def _fields_at(kind: Any, path: str) -> list[str]:
    """In the order in which they are declared, each once."""
    structs = (one for one in _types_at(kind, path) if isinstance(one, inspect.StructType))
    return list(dict.fromkeys(field.encode_name for one in structs for field in one.fields))


def _types_at(kind: Any, path: str) -> list[inspect.Type]:
    """What may stand at a place such as `versions[0].weight`."""
    types = list(_alternatives(_type_info(kind)))
    for step in _STEP.finditer(path):
        types = [found for one in types for found in _inside(one, step[1])]
    return types


@lru_cache(maxsize=64)
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _alternatives(one: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(one, inspect.Metadata):
        yield from _alternatives(one.type)
    elif isinstance(one, inspect.UnionType):
        for member in one.types:
            yield from _alternatives(member)
    else:
        yield one


def _inside(one: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """name: of a field; None = of an item, or of a value of a map."""
    inner: Iterable[inspect.Type] = ()
    if isinstance(one, inspect.StructType):
        inner = (field.type for field in one.fields if field.encode_name == name)
    elif name is None and isinstance(one, inspect.ListType | inspect.VarTupleType):
        inner = (one.item_type,)
    elif name is None and isinstance(one, inspect.DictType):
        inner = (one.value_type,)
    for found in inner:
        yield from _alternatives(found)
