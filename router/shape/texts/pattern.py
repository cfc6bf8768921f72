"""`pattern` of JSON Schema as a set of texts. Pure.

ECMA 262, Python's `re` and Rust's `regex` read some expressions differently. A pattern is read
twice: as the texts that all of them accept for certain, and as those that one of them may accept.
What has no such reading is refused.
"""

import unicodedata
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import groupby

import msgspec

from loraplex.router.shape.texts.regex import (
    ANYTHING,
    EMPTY,
    CharSet,
    Regex,
    alt,
    chars,
    other_chars,
    rep,
    seq,
)

_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_DIGIT = chars([(48, 57)])
_WORD = chars([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACE = chars([(9, 13), (32, 32)])
_ANY_SPACE = chars(
    [(9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
    + [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
)
_LINE_END = chars([(10, 10), (13, 13), (0x2028, 0x2029)])
_NEWLINE = chars([(10, 10)])
_DEEPEST = 60
# No text has so many characters that more repetitions would matter.
_MOST_REPEATS = 100_000


class PatternRefused(ValueError):
    """str() says why."""


class _Edge(msgspec.Struct, frozen=True):
    """`^` or `$`."""

    sign: str


class _Sequence(msgspec.Struct, frozen=True):
    parts: "tuple[_Node, ...]"


class _Options(msgspec.Struct, frozen=True):
    options: "tuple[_Node, ...]"


class _Repeat(msgspec.Struct, frozen=True):
    part: "_Node"
    least: int
    most: int | None


_Node = CharSet | _Edge | _Sequence | _Options | _Repeat


def texts_of(pattern: str, *, for_certain: bool) -> Regex:
    """The texts in which the pattern matches anywhere. Raises PatternRefused. for_certain: all
    readers accept them; else all that a reader may accept."""
    return (_read if len(pattern) > _MOST_KEPT else _kept)(pattern, for_certain)


def _read(pattern: str, for_certain: bool) -> Regex:
    node = _Reader(pattern, for_certain).read()
    return _Placed(for_certain).whole(node)


# Characters of a pattern that is kept as it was read: 150 bytes each.
_MOST_KEPT = 1024
_kept = lru_cache(256)(_read)


# The ranges hold every character that Unicode has given a meaning.
_ASSIGNED = (range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE0200))


@cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    """Runs of characters, by the category that Unicode gives them."""
    found: dict[str, list[tuple[int, int]]] = {}
    for codes in _ASSIGNED:
        for category, run in groupby(codes, lambda code: unicodedata.category(chr(code))):
            run_codes = list(run)
            found.setdefault(category, []).append((run_codes[0], run_codes[-1]))
    return found


@cache
def _category(begin: str) -> CharSet:
    """Characters whose category begins so."""
    named = _categories().items()
    return chars(run for name, runs in named if name.startswith(begin) for run in runs)


@cache
def _any_word() -> CharSet:
    return chars([*(r for begin in "LNM" for r in _category(begin).ranges), (95, 95)])


def _class(letter: str, widest: bool) -> CharSet:
    """The characters of `\\d` and its like: those that are in it for certain, or may be."""
    if letter.isupper():
        return other_chars(_class(letter.lower(), not widest))
    if letter == "d":
        return _category("Nd") if widest else _DIGIT
    if letter == "w":
        return _any_word() if widest else _WORD
    return _ANY_SPACE if widest else _SPACE


_CLASSES = frozenset("dwsDWS")


class _Reader:
    def __init__(self, pattern: str, for_certain: bool) -> None:
        self._pattern = pattern
        self._certain = for_certain
        self._at = 0
        self._depth = 0

    def read(self) -> _Node:
        node = self._options()
        if self._at < len(self._pattern):
            raise PatternRefused("a `)` closes no group")
        return node

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise PatternRefused("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _peek(self, count: int = 1) -> str:
        return self._pattern[self._at : self._at + count]

    def _options(self) -> _Node:
        options: list[_Node] = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Options(tuple(options))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._piece())
        return _Sequence(tuple(parts))

    def _piece(self) -> _Node:
        character = self._next()
        if character in "*+?":
            raise PatternRefused(f"`{character}` repeats nothing")
        if character == "{":
            raise PatternRefused("write a `{` that is text as `\\{`")
        if character in "^$":
            return _Edge(character)
        return self._repeated(self._group() if character == "(" else self._atom(character))

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise PatternRefused(f"groups are nested more than {_DEEPEST} deep")
        if self._peek() == "?":
            start = self._pattern[self._at - 1 :][:4]
            if self._peek(2) != "?:":
                reason = "lookarounds, named groups and flags have no place"
                raise PatternRefused(f"`{start}`: {reason}")
            self._at += 2
        node = self._options()
        if self._peek() != ")":
            raise PatternRefused("a group is not closed")
        self._at += 1
        self._depth -= 1
        return node

    def _atom(self, character: str) -> CharSet:
        if character == ".":
            return other_chars(_LINE_END if self._certain else _NEWLINE)
        if character == "[":
            return self._set()
        if character != "\\":
            return _one(character)
        if self._peek() and self._peek() in _CLASSES:
            return _class(self._next(), not self._certain)
        return _one(self._escaped())

    def _escaped(self) -> str:
        """The character that an escape stands for."""
        character = self._next()
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character in "xu":
            digits = self._peek(2 if character == "x" else 4)
            self._at += len(digits)
            if len(digits) % 2 or not digits or not _is_hex(digits):
                raise PatternRefused(f"`\\{character}{digits}` is no character")
            if 0xD800 <= int(digits, 16) <= 0xDFFF:
                raise PatternRefused(f"`\\u{digits}` is half of a character")
            return chr(int(digits, 16))
        if character.isalnum() or not character.isascii() or character == "_":
            raise PatternRefused(f"`\\{character}` cannot be held to")
        return character

    def _repeated(self, node: _Node) -> _Node:
        """The node with its quantifier, if one follows. Lazy ones match the same texts."""
        found = self._peek()
        if not found or found not in "*+?{":
            return node
        self._at += 1
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        least, most = self._bounds() if found == "{" else bounds[found]
        if self._peek() == "?":
            self._at += 1
        if self._peek() and self._peek() in "*+?{":
            raise PatternRefused("a repetition is repeated")
        return _Repeat(node, least, most)

    def _bounds(self) -> tuple[int, int | None]:
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at : max(end, self._at)].partition(",")
        self._at = end + 1
        if end < 0 or not is_count(low) or not (high == "" or is_count(high)):
            raise PatternRefused("write a `{` that is text as `\\{`")
        if high and int(low) > int(high):
            raise PatternRefused(f"`{{{low},{high}}}` repeats nothing")
        most = int(high) if high else None if comma else int(low)
        if max(int(low), most or 0) > _MOST_REPEATS:
            raise PatternRefused(f"it repeats more than {_MOST_REPEATS} times")
        return int(low), most

    def _set(self) -> CharSet:
        negated = self._peek() == "^"
        self._at += negated
        if self._peek() == "]":
            raise PatternRefused("a class of characters is empty")
        widest = negated is self._certain
        found: list[tuple[int, int]] = []
        while (character := self._next()) != "]":
            found += self._member(character, widest).ranges
        return other_chars(chars(found)) if negated else chars(found)

    def _member(self, character: str, widest: bool) -> CharSet:
        if character == "\\" and self._peek() and self._peek() in _CLASSES:
            found = _class(self._next(), widest)
            if self._peek() == "-" and self._peek(2) != "-]":
                raise PatternRefused("write a `-` that is text as `\\-`")
            return found
        first = self._in_set(character)
        if self._peek() != "-" or self._peek(2) in ("-]", "-"):
            return _one(first)
        self._at += 1
        last = self._next()
        if last == "\\" and self._peek() and self._peek() in _CLASSES:
            raise PatternRefused("write a `-` that is text as `\\-`")
        last = self._in_set(last)
        if first > last:
            raise PatternRefused(f"`{first}-{last}` is no range")
        return chars([(ord(first), ord(last))])

    def _in_set(self, character: str) -> str:
        if character != "\\":
            return character
        if self._peek() == "b":
            self._at += 1
            return "\b"
        return self._escaped()


class _Placed:
    """Gives `^` and `$` their places."""

    def __init__(self, for_certain: bool) -> None:
        # Python's `$` lets a newline follow.
        self._end = EMPTY if for_certain else alt(EMPTY, _NEWLINE)

    def whole(self, node: _Node) -> Regex:
        found: list[Regex] = []
        for begun in self._ways(node, "^"):
            begins = begun[:1] == (_Edge("^"),)
            for way in self._ways(_Sequence(begun[begins:]), "$"):
                ends = way[-1:] == (_Edge("$"),)
                inner = self._plain(_Sequence(way[: len(way) - ends]))
                tail = self._end if ends else ANYTHING
                found.append(seq(EMPTY if begins else ANYTHING, inner, tail))
        return alt(*found)

    def _ways(self, node: _Node, sign: str) -> "list[tuple[_Node, ...]]":
        """Sequences, in which the edge stands at its end of the text, if at all."""
        if isinstance(node, _Options):
            return [way for option in node.options for way in self._ways(option, sign)]
        if not isinstance(node, _Sequence):
            return [(node,)]
        edge, parts = _Edge(sign), node.parts
        outer, inner = (0, 1) if sign == "^" else (-1, -2)
        while len(parts) > 1 and parts[outer] == parts[inner] == edge:
            parts = parts[1:] if sign == "^" else parts[:-1]
        if not parts or parts[outer] == edge or not _has_edge(parts[outer], sign):
            return [parts]
        if isinstance(parts[outer], _Repeat):
            raise PatternRefused(f"`{sign}` in a repetition cannot be held to")
        rest = parts[1:] if sign == "^" else parts[:-1]
        ways = self._ways(parts[outer], sign)
        joined = [(*way, *rest) if sign == "^" else (*rest, *way) for way in ways]
        return [way for one in joined for way in self._ways(_Sequence(one), sign)]

    def _plain(self, node: _Node) -> Regex:
        match node:
            case CharSet():
                return node
            case _Edge(sign):
                raise PatternRefused(f"`{sign}` stands where it cannot be held to")
            case _Repeat(part, least, most):
                return rep(self._plain(part), least, most)
            case _Sequence(parts):
                return seq(*map(self._plain, parts))
            case _Options(options):
                return alt(*map(self._plain, options))


def _has_edge(node: _Node, sign: str) -> bool:
    match node:
        case CharSet():
            return False
        case _Edge():
            return node.sign == sign
        case _Repeat(part):
            return _has_edge(part, sign)
        case _Sequence(parts) | _Options(parts):
            return any(_has_edge(part, sign) for part in parts)


_is_hex: Callable[[str], bool] = frozenset("0123456789abcdefABCDEF").issuperset


def is_count(text: str) -> bool:
    """Whether the text spells a number that a pattern or a place in a list can have."""
    return text.isascii() and text.isdigit() and len(text) < 7


def _one(character: str) -> CharSet:
    return chars([(ord(character),) * 2])
