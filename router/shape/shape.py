"""The form that an answer must have, as callers say it. Pure.

param: the field that asked for it, as the caller spelled it; errors name places below it.
"""

from typing import Any, Literal

import msgspec


class AnyJson(msgspec.Struct, frozen=True):
    """A JSON object, whatever is in it."""

    param: str


class JsonSchema(msgspec.Struct, frozen=True):
    """JSON text that the schema accepts. source: where in the body the schema stands is `param`."""

    schema: dict[str, Any] | bool
    param: str


class Regex(msgspec.Struct, frozen=True):
    """A text that the pattern matches from its begin to its end."""

    pattern: str
    param: str


class Choice(msgspec.Struct, frozen=True):
    """One of these texts."""

    texts: tuple[str, ...]
    param: str


class Grammar(msgspec.Struct, frozen=True):
    """A text of a context-free grammar: llguidance's Lark, or GBNF as llama.cpp and xgrammar have
    it."""

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
