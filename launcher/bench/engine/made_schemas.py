"""Schemas from a seed, and grammars of answers that keep to them. Pure."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

# So many objects that no answer of a benchmark ends before its length.
_MOST_OBJECTS = 900
_KINDS: tuple[Callable[[Random], dict[str, Any]], ...] = (
    lambda rng: {"type": "string", "maxLength": rng.randint(4, 30)},
    lambda rng: {"type": "integer", "minimum": 0, "maximum": rng.randint(9, 10**6)},
    lambda rng: {"enum": [f"{_word(rng)}" for _ in range(rng.randint(2, 12))]},
    lambda rng: {"type": "boolean"},
    lambda rng: {"type": "string", "format": rng.choice(("date", "uuid", "email"))},
    lambda rng: {"type": "array", "items": {"type": "number"}, "maxItems": rng.randint(1, 5)},
)


def json_of(rng: Random) -> str:
    """JSON that a schema accepts, as a term of a grammar."""
    return f"%json {json.dumps(_schema(rng))}"


def endless_json(rng: Random) -> str:
    """A grammar of one such object after another, each after a `>`."""
    return f'start: one{{{_MOST_OBJECTS}}}\none: ">" {json_of(rng)}\n'


def _schema(rng: Random) -> dict[str, Any]:
    """An object of a few properties of any kind, one of them an object."""
    properties = {_word(rng): rng.choice(_KINDS)(rng) for _ in range(rng.randint(3, 8))}
    inner = {_word(rng): rng.choice(_KINDS)(rng) for _ in range(3)}
    properties[_word(rng)] = _object(inner)
    return _object(properties)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _word(rng: Random) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(3, 12)))
