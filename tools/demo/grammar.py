"""Expands the `[a|b]` templates and roughens the text the way hurried people type."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from random import Random

Node = str | tuple[tuple["Node", ...], ...]

_PLACEHOLDER = re.compile(r"(\{[a-z]+\})")


def _parse(text: str, at: int, inside: bool) -> tuple[tuple[tuple[Node, ...], ...], int]:
    """The alternatives from `at` to the closing bracket (or the end), and where that is."""
    alternatives: list[tuple[Node, ...]] = []
    nodes: list[Node] = []
    literal = ""
    while at < len(text):
        char = text[at]
        if char == "[":
            choice, at = _parse(text, at + 1, True)
            nodes += [literal, choice]
            literal = ""
        elif inside and char in "|]":
            alternatives.append((*nodes, literal))
            nodes, literal = [], ""
            if char == "]":
                return tuple(alternatives), at
        else:
            literal += char
        at += 1
    if inside:
        raise ValueError(f"unclosed bracket in {text!r}")
    return ((*nodes, literal),), at


@cache
def _parsed(template: str) -> tuple[Node, ...]:
    return _parse(template, 0, False)[0][0]


def _walk(nodes: tuple[Node, ...], rng: Random) -> str:
    return "".join(
        node if isinstance(node, str) else _walk(rng.choice(node), rng) for node in nodes
    )


def expand(template: str, rng: Random) -> str:
    """One reading of a template, its placeholders still in place."""
    return _walk(_parsed(template), rng)


def placeholders(text: str) -> list[str]:
    """The names of the placeholders left in a text, in order."""
    return [part[1:-1] for part in _PLACEHOLDER.split(text)[1::2]]


def fill(text: str, value: Callable[[str], str]) -> str:
    """Replaces each placeholder by its value."""
    return _PLACEHOLDER.sub(lambda match: value(match.group()[1:-1]), text)


def _literals(text: str, change: Callable[[str], str]) -> str:
    """Changes the text outside placeholders, so that no fact is ever misspelled."""
    parts = _PLACEHOLDER.split(text)
    parts[::2] = [change(part) for part in parts[::2]]
    return "".join(parts)


def _misspell(word: str, rng: Random) -> str:
    at = rng.randrange(1, len(word) - 1)
    roll = rng.random()
    if roll < 0.35:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if roll < 0.7:
        return word[:at] + word[at + 1 :]
    return word[:at] + word[at] + word[at:]


def typos(text: str, rng: Random) -> str:
    """Misspells about one word in eight."""

    def change(part: str) -> str:
        return re.sub(
            r"[A-Za-z]{4,}",
            lambda m: _misspell(m.group(), rng) if rng.random() < 0.12 else m.group(),
            part,
        )

    return _literals(text, change)


def unpunctuated(text: str) -> str:
    """Removes the commas and apostrophes that people in a hurry leave out."""
    return _literals(text, lambda part: re.sub(r"[',]", "", part))
