"""A request body's bytes to a typed struct: strict JSON, every fault named by its field. Pure."""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from adapters.strict_json import StrictJsonError, decode_object, outside_strings
from router.generation import RequestError

# What is cheap to send must not be dear to walk: arrays, objects and keys; values of any kind.
MAX_PARTS = 1 << 16
MAX_VALUES = 1 << 18
_FAULT = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)
_PATTERN = re.compile(r"matching regex '\^(?P<form>.*)\\\\Z'", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

T = TypeVar("T", bound=msgspec.Struct)


def decode_body(body: bytes, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """The typed body, and all of it as plain values (for fields that `kind` does not know).

    Refused: bytes that are no UTF-8 JSON object (RFC 8259), a byte order mark, NaN and Infinity,
    lone surrogates, a key that occurs twice, more than 32 levels or too many values, values of
    another type than declared or out of range. Raises RequestError (invalid).
    """
    plain = decode_plain(body)
    try:
        return msgspec.convert(plain, kind, str_keys=True), plain
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None


def decode_plain(data: bytes) -> dict[str, Any]:
    """A JSON object as plain values, as strictly as `decode_body`. Raises RequestError."""
    check_size(data)
    try:
        plain = decode_object(data)
        if _SURROGATE.search(data):
            msgspec.json.encode(plain)
        return plain
    except StrictJsonError as error:
        raise RequestError("invalid", f"expected a JSON object: {error}") from None
    except UnicodeEncodeError:
        raise RequestError("invalid", "a string holds half of a surrogate pair") from None


def require(condition: object, message: str, param: str) -> None:
    """Raises RequestError (invalid) that names the field unless the condition holds."""
    if not condition:
        raise RequestError("invalid", f"`{param}`: {message}", param=param)


def check_query(query: Mapping[str, str], known: Collection[str]) -> None:
    """Raises RequestError: a filter that is misspelt must not be a filter that is not there."""
    for parameter in query:
        require(parameter in known, "unknown parameter", parameter[:100])


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


def _field_error(text: str) -> RequestError:
    """From `Expected `int`, got `str` - at `$.a.b[0]`` to the field and what is wrong with it."""
    match = _FAULT.fullmatch(text)
    if match is None:
        missing = re.search(r"required field `(\w+)`", text)
        return RequestError("invalid", fault_text(text), param=missing[1] if missing else None)
    path = match["path"].removeprefix("parameters.")
    key = "a key: " if match["key"] else ""
    return RequestError("invalid", f"`{path}`: {key}{fault_text(match['what'])}", param=path)


def fault_text(text: str) -> str:
    """msgspec's words for a fault, as they go on behind a field's name."""
    return _PATTERN.sub(r"of the form \g<form>", text[:1].lower() + text[1:])
