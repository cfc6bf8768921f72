"""The form that an answer must have, as callers say it. Pure.

param: the field that asked for it, as the caller spelled it; errors name places below it.
"""

from typing import Any, Literal

import msgspec


class ShapeRefused(ValueError):
    """No answer can have the form, or none can be held to it. param: the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class AnyJson(msgspec.Struct, frozen=True):
    """A JSON object, whatever is in it. whitespace: see JsonSchema."""

    param: str
    whitespace: str | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """JSON text that the schema accepts.

    whitespace: pattern of what may stand between its parts; "" = nothing, None = the usual.
    """

    schema: dict[str, Any] | bool
    param: str
    whitespace: str | None = None


class Regex(msgspec.Struct, frozen=True):
    """A text that the pattern matches from its begin to its end."""

    pattern: str
    param: str


class Choice(msgspec.Struct, frozen=True):
    """One of these texts."""

    texts: tuple[str, ...]
    param: str


class Grammar(msgspec.Struct, frozen=True):
    """A text of a context-free grammar: llguidance's Lark, or GBNF as llama.cpp has it."""

    source: str
    syntax: Literal["lark", "gbnf"]
    param: str


class Tag(msgspec.Struct, frozen=True):
    """begin, then JSON of the schema, then end."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class StructuralTag(msgspec.Struct, frozen=True):
    """Free text, in which each of `triggers` begins one of the tags."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    param: str


Shape = AnyJson | JsonSchema | Regex | Choice | Grammar | StructuralTag
