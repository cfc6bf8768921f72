"""Reads one setting of a table; ValueError says what is wrong with it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

Table = Mapping[str, Any]


def integer(table: Table, *keys: str, default: int | None = None) -> int:
    """The integer of the first key that has a value."""
    value = next((table[key] for key in keys if table.get(key) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{keys[0]} must be an integer, got {value!r}")
    return value


def flag(table: Table, key: str, default: bool) -> bool:
    value = table.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def one_of(table: Table, key: str, served: Sequence[str], default: str | None = None) -> str:
    """A name that is served; of any case."""
    value = table.get(key)
    if value is None:
        value = default
    found = value.lower() if isinstance(value, str) else ""
    if found not in served:
        raise ValueError(f"{key} must be {' or '.join(served)}, got {value!r}")
    return found


def inner(table: Table, key: str) -> Table:
    """A table in a table; empty where nothing is said."""
    value = table.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a table, got {value!r}")
    return value


def group_size(table: Table, *keys: str, default: int | None = None) -> int | None:
    """Inputs that share a scale; -1 and None stand for all."""
    if default is None and all(table.get(key) is None for key in keys):
        return None
    size = integer(table, *keys, default=default)
    if size == -1:
        return None
    if size <= 0:
        raise ValueError(f"{keys[0]} must be positive or -1, got {size}")
    return size


def bits(table: Table, *keys: str, served: Sequence[int]) -> int:
    found = integer(table, *keys)
    if found not in served:
        choice = " or ".join(map(str, served))
        raise ValueError(f"{keys[0]} must be {choice}, got {found}")
    return found
