"""A request body's bytes to a typed struct: strict JSON, every fault named by its field. Pure."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from loraplex.adapters.common.strict_json import (
    LongNumberError,
    StrictJsonError,
    decode_object,
    outside_strings,
)
from loraplex.router.call import RequestError

# Limits of what is cheap to send and dear to walk: arrays, objects and keys; values of any kind.
MAX_PARTS = 1 << 16
MAX_VALUES = 1 << 18
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

T = TypeVar("T", bound=msgspec.Struct)
N = TypeVar("N", bound=str)
V = TypeVar("V")

_FLOAT_FOR_INT = re.compile(r"Expected `int.*`, got `float` - at `\$\.(?P<path>[\w.]+)`")


def decode_body(body: bytes, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """The typed body, and all of it as plain values (for fields that `kind` does not know).

    Refused: bytes that are no UTF-8 JSON object (RFC 8259), NaN and Infinity, lone surrogates,
    repeated keys. So are more than 32 levels, too many values, and values out of
    range or of another type than declared. Raises RequestError (invalid).
    """
    plain = decode_plain(body)
    return typed(plain, kind), plain


def typed(plain: dict[str, Any], kind: type[T]) -> T:
    """Fields that `kind` does not know are left out. A whole number may be written as 4.0, as JSON
    Schema has it. Raises RequestError (invalid)."""
    try:
        return msgspec.convert(plain, kind, str_keys=True)
    except msgspec.ValidationError as error:
        place = _FLOAT_FOR_INT.fullmatch(str(error))
        whole = None if place is None else _whole_at(plain, place["path"])
        if whole is None:
            raise _field_error(error, kind) from None
    return typed(whole, kind)


def _whole_at(plain: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Writes a field's whole number as an integer; None = there is none at the path."""
    outer, _, inner = path.partition(".")
    value: Any = plain.get(outer)
    found: Any = None
    if inner and isinstance(value, dict):
        found = _whole_at(value, inner)
    elif isinstance(value, float) and value.is_integer():
        found = int(value)
    return None if found is None else plain | {outer: found}


def decode_plain(data: bytes) -> dict[str, Any]:
    """A JSON object as plain values, as strictly as `decode_body`. Raises RequestError."""
    check_size(data)
    try:
        plain = decode_object(data)
        if _SURROGATE.search(data):
            msgspec.json.encode(plain)
        return plain
    except LongNumberError as error:
        raise RequestError("invalid", str(error)) from None
    except StrictJsonError as error:
        raise RequestError("invalid", f"expected a JSON object: {error}") from None
    except UnicodeEncodeError:
        raise RequestError("invalid", "a string holds half of a surrogate pair") from None


def require(condition: object, message: str, param: str) -> None:
    """Checks a condition of a field. Raises RequestError (invalid), which names the field."""
    if not condition:
        raise RequestError("invalid", f"`{param}`: {message}", param=param)


def agreed(said: Mapping[str, V | None]) -> V | None:
    """Returns what fields say of one thing; None = they say nothing. said: by field. Raises
    RequestError where two contradict each other.
    """
    given = {name: value for name, value in said.items() if value is not None}
    first = next(iter(given), "")
    for name, value in given.items():
        require(same(value, given[first]), f"contradicts `{first}`", name)
    return given.get(first)


def same(one: Any, other: Any) -> bool:
    """Compares two values of JSON, in which 1 and true differ; they are equal in Python."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def whole_number(text: str, least: int, most: int, param: str) -> int:
    """Reads a number of a query. Raises RequestError for what is none, or out of range."""
    is_whole = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    good = is_whole and least <= int(text) <= most
    require(good, f"expected {least} to {most}, got {text[:40]!r}", param)
    return int(text)


def only_one_of(plain: Mapping[str, Any], names: Sequence[N]) -> N:
    """Finds the one of these fields that the body has: it says which API's shape the body is of.
    Raises RequestError for none and for several."""
    said = [name for name in names if plain.get(name) is not None]
    others = " or ".join(f"`{name}`" for name in names[1:])
    require(said, f"is needed, or {others} in its place", names[0])
    require(len(said) == 1, f"give it or `{said[0]}`, not both", said[-1])
    return said[0]


def check_query(query: Iterable[tuple[str, str]], known: Collection[str]) -> None:
    """Checks that a query has only known parameters, each once. query: its parameters, each as
    often as it is there. Raises RequestError.

    A filter that is misspelt must not be a filter that is not there; of two values none is meant
    more than the other.
    """
    seen: set[str] = set()
    for parameter, _ in query:
        expected = ", ".join(known) or "none"
        require(parameter in known, f"unknown parameter; known: {expected}", parameter[:100])
        require(parameter not in seen, "given more than once", parameter)
        seen.add(parameter)


def check_no_fields(body: bytes, query: Collection[str]) -> None:
    """Checks that a body, where it has no effect, is empty or has no fields. Otherwise an option
    there would be lost without an error. Raises RequestError.

    query: what is said there.
    """
    if not body:
        return
    for field in decode_plain(body):
        hint = f"say it in the query: ?{field}=" if field in query else "this route takes no fields"
        require(False, f"unknown field; {hint}", field[:100])


def check_size(body: bytes) -> None:
    """Counts what the JSON text holds before anything is built of it. Raises RequestError."""
    if len(body) <= MAX_PARTS or not _too_much(body):
        return
    fault = _too_much(outside_strings(body))
    if fault is not None:
        raise RequestError("invalid", f"the body holds more than {fault}")


def _too_much(data: bytes) -> str | None:
    if data.count(b"[") + data.count(b"{") + data.count(b":") > MAX_PARTS:
        return f"{MAX_PARTS} arrays, objects and keys"
    return f"{MAX_VALUES} values" if data.count(b",") > MAX_VALUES else None


def _field_error(error: msgspec.ValidationError, kind: Any) -> RequestError:
    fault = field_fault(error, kind)
    fault = msgspec.structs.replace(fault, field=fault.field.removeprefix("parameters."))
    return RequestError("invalid", str(fault), param=fault.field or None)


# Characters of a value that a message quotes.
_MOST_SHOWN = 80
_PLACE = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"(\w+)|\[[^\]]*\]")
_PATTERN = re.compile(r"matching regex '\^(?P<form>.*)\\\\Z'", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_NO_CHOICE = re.compile(r"Invalid enum value (?P<got>.*)", re.DOTALL)
_OTHER_TYPE = re.compile(r"Expected `.*`, got (?P<got>`\w+`)")


class FieldFault(msgspec.Struct, frozen=True):
    """Fault of one field of a body. field: where it is, as `versions[0].weight`; "" = the whole."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"`{self.field}`: {self.message}" if self.field else self.message


def field_fault(error: msgspec.ValidationError, kind: Any) -> FieldFault:
    """The field at fault, the fault, and what it may be. kind: what was expected in all."""
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
    """msgspec's own words, as they go on behind a field's name."""
    return _PATTERN.sub(r"of the form \g<form>", what[:1].lower() + what[1:])


def _choices(what: str, kind: Any, path: str) -> str | None:
    """Says which values a field may have and which came, if one of a few was expected."""
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
    """Lists the fields at a path, in the order in which they are declared, each once."""
    structs = (one for one in _types_at(kind, path) if isinstance(one, inspect.StructType))
    return list(dict.fromkeys(field.encode_name for one in structs for field in one.fields))


def _types_at(kind: Any, path: str) -> list[inspect.Type]:
    """The types that may stand at a place such as `versions[0].weight`."""
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
    """The types of a field, of items, or of a map's values. name: None = of an item or value."""
    inner: Iterable[inspect.Type] = ()
    if isinstance(one, inspect.StructType):
        inner = (field.type for field in one.fields if field.encode_name == name)
    elif name is None and isinstance(one, inspect.ListType | inspect.VarTupleType):
        inner = (one.item_type,)
    elif name is None and isinstance(one, inspect.DictType):
        inner = (one.value_type,)
    for found in inner:
        yield from _alternatives(found)
