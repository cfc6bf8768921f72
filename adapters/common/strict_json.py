"""JSON from a tenant: bounded, without duplicate keys, NaN or Infinity (RFC 8259). Pure."""

import json
import sys
from typing import Any, NoReturn

MAX_DEPTH = 32
MAX_ITEMS = 500_000
_PIECE_BYTES = 16 << 10
_KINDS = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


class StrictJsonError(ValueError):
    """The bytes are not one well-formed JSON object within the bounds. str(): what is wrong."""


class LongNumberError(StrictJsonError):
    """An integer is longer than Python reads."""


class _Duplicates(ValueError):
    """A key came twice; reading one of the two would be a guess."""


class _Constant(ValueError):
    """A constant that Python would read, and JSON does not have."""


def decode_object(data: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object that `data` spells. Raises StrictJsonError and nothing else."""
    # Counted before it is parsed, since that is what takes memory.
    if count_items(data) > MAX_ITEMS and count_items(outside_strings(data)) > MAX_ITEMS:
        raise StrictJsonError(f"of more than {MAX_ITEMS} items")
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except RecursionError:
        raise StrictJsonError("nested too deeply") from None
    except _Duplicates as error:
        raise StrictJsonError(str(error)) from None
    except UnicodeDecodeError:
        raise StrictJsonError("not UTF-8") from None
    except (_Constant, json.JSONDecodeError) as error:
        raise StrictJsonError(f"not JSON: {ascii(str(error))[:120]}") from None
    except ValueError:  # of `int`, whose own words are of a setting of Python's
        digits = sys.get_int_max_str_digits()
        raise LongNumberError(f"a number has more than {digits} digits") from None
    if not isinstance(value, dict):
        raise StrictJsonError(f"not a JSON object but {_KINDS.get(type(value), 'a number')}")
    # Few brackets open no deep value, and counting them takes no time.
    if data.count(b"[") + data.count(b"{") > max_depth and _deeper_than(value, max_depth):
        raise StrictJsonError(f"nested more than {max_depth} deep")
    return value


def outside_strings(data: bytes) -> bytes:
    """Cuts the strings out of a JSON text: they may hold any number of commas. Other threads run
    between its pieces."""
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept, is_inside = list[bytes](), False
    for start in range(0, len(unescaped), _PIECE_BYTES):
        parts = unescaped[start : start + _PIECE_BYTES].split(b'"')
        kept += parts[is_inside::2]
        is_inside ^= len(parts) % 2 == 0
    return b"".join(kept)


def count_items(data: bytes) -> int:
    """Counts commas, colons and opening brackets: every value comes after one of these."""
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicates(f"duplicate key {ascii(key)[:80]}")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _Constant(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _deeper_than(value: object, max_depth: int) -> bool:
    level: list[object] = [value]
    for _ in range(max_depth):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
