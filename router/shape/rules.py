"""Each form of an answer as an expression of a grammar; GBNF, the grammars of llama.cpp and
xgrammar, as rules in llguidance's Lark. Pure.

A form that no grammar can say exactly is refused, with the field that asked for it. Every literal
and class of characters of GBNF is a lexeme of its own. A greedy lexeme would hide what the grammar
allows after it: llguidance's `gbnf_to_lark` folds rules so, and refuses `x=1` by the arithmetic
grammar of llama.cpp. It also misreads `.`, `[+--]`, code points with leading zeros, and rules
defined twice.

One gap is left: a literal hides a shorter one that begins it. So `("a" | "ab") "b"` accepts no
`ab`.
"""

import re
from typing import Any, NamedTuple, NoReturn, assert_never

from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema.json_rules import ONE_LINE, Spacing, json_grammar
from loraplex.router.shape.schema.keywords import SchemaRefused, below
from loraplex.router.shape.shape import (
    AnyJson,
    Choice,
    Grammar,
    JsonSchema,
    Regex,
    Shape,
    ShapeRefused,
    StructuralTag,
)

_ROOT = "root"
_MAX_DEPTH = 100
_MAX_REPEATS = 10_000
_ESCAPED = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])"
_TOKEN = re.compile(
    r"(?P<space>(?:[ \t\r\n]|\#[^\n]*)+)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)"
    r"|(?P<becomes>::=)"
    rf'|(?P<text>"(?:[^"\\\n]|{_ESCAPED})*")'
    rf"|(?P<class>\[\^?(?:[^\]\\\n]|{_ESCAPED})*\])"
    r"|(?P<any>\.)"
    r"|(?P<repeat>[*+?]|\{[ ]*[0-9]{0,6}[ ]*(?:,[ ]*[0-9]{0,6}[ ]*)?\})"
    r"|(?P<mark>[()|])"
)
_PIECE = re.compile(rf"{_ESCAPED}|.", re.S)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}

_OBJECT: dict[str, Any] = {"type": "object"}
# A pattern matches a whole text, so a `^` before it and a `$` after it add nothing.
_END = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")


class GbnfError(ValueError):
    """The text is no GBNF grammar; str() says where and why."""


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def gbnf_rules(source: str, writer: Lark) -> str:
    """Returns the expression of the rule `root`. Raises GbnfError."""
    return _Reader(source, writer).root()


class _Reader:
    def __init__(self, source: str, writer: Lark) -> None:
        self._source = source
        self._writer = writer
        self._tokens = _tokens(source)
        self._next = 0
        self._depth = 0
        self._names: dict[str, str] = {}

    def root(self) -> str:
        bodies: dict[str, str] = {}
        starts = [i for i, token in enumerate(self._tokens) if token.kind == "becomes"]
        for start in starts:
            name = self._tokens[start - 1] if start else None
            if name is None or name.kind != "name":
                _fail("expected a rule's name before ::=", self._source, self._tokens[start].at)
            if name.text in self._names:
                _fail(f"the rule {name.text} is there twice", self._source, name.at)
            self._names[name.text] = self._writer.reserve("rule")
        if _ROOT not in self._names:
            raise GbnfError("it has no rule `root`")
        while not self._is_over():
            name = self._take("name", "expected a rule's name")
            self._take("becomes", "expected ::=")
            bodies[name.text] = self._alternatives()
        for rule, body in bodies.items():
            self._writer.define(self._names[rule], body)
        return self._names[_ROOT]

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._at("mark", "|"):
            self._next += 1
            found.append(self._sequence())
        return found[0] if len(found) == 1 else self._writer.either(found)

    def _sequence(self) -> str:
        items: list[str] = []
        while (item := self._item()) is not None:
            while self._at("repeat"):
                item += self._repeat(self._tokens[self._next])
                self._next += 1
            items.append(item)
        return " ".join(items) or '""'

    def _item(self) -> str | None:
        if self._is_over() or self._begins_rule():
            return None
        token = self._tokens[self._next]
        if token.kind == "mark":
            return self._group(token) if token.text == "(" else None
        if token.kind in ("repeat", "becomes"):
            _fail(f"unexpected {token.text}", self._source, token.at)
        self._next += 1
        if token.kind == "name":
            if token.text not in self._names:
                _fail(f"there is no rule {token.text}", self._source, token.at)
            return self._names[token.text]
        if token.kind == "text":
            return self._writer.literal("".join(self._characters(token)))
        return self._writer.regex("(?s:.)" if token.kind == "any" else self._class(token))

    def _group(self, opened: _Token) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            _fail(f"more than {_MAX_DEPTH} groups in groups", self._source, opened.at)
        self._next += 1
        body = self._alternatives()
        if not self._at("mark", ")"):
            _fail("a group that does not end", self._source, opened.at)
        self._next += 1
        self._depth -= 1
        return f"({body})"

    def _repeat(self, token: _Token) -> str:
        if token.text in "*+?":
            return token.text
        least, comma, most = token.text.strip("{} ").partition(",")
        low = int(least or 0)
        high = int(most) if most.strip() else None if comma else low
        if not (least.strip() or most.strip()) or (high is not None and high < low):
            _fail(f"no such repetition: {token.text}", self._source, token.at)
        if max(low, high or 0) > _MAX_REPEATS:
            _fail(f"more than {_MAX_REPEATS} repetitions", self._source, token.at)
        return f"{{{low},{'' if high is None else high}}}"

    def _class(self, token: _Token) -> str:
        negated = token.text.startswith("[^")
        inside = token._replace(text=token.text[negated:])
        pieces = _PIECE.findall(inside.text[1:-1])
        points = self._characters(inside)
        parts: list[str] = []
        i = 0
        while i < len(points):
            low = high = points[i]
            if i + 2 < len(points) and pieces[i + 1] == "-":
                high = points[i + 2]
                i += 2
            if high < low:
                _fail(f"no such range: {low}-{high}", self._source, token.at)
            parts.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
            i += 1
        if not parts and not negated:
            _fail("an empty class of characters", self._source, token.at)
        return f"[{'^' if negated else ''}{''.join(parts)}]" if parts else "(?s:.)"

    def _characters(self, token: _Token) -> list[str]:
        """The characters between the first and the last of the token."""
        found = [_character(piece) for piece in _PIECE.findall(token.text[1:-1])]
        if not all(0 <= ord(c) < 0xD800 or ord(c) > 0xDFFF for c in found):
            _fail("half of a surrogate pair", self._source, token.at)
        return found

    def _begins_rule(self) -> bool:
        after = self._tokens[self._next + 1 : self._next + 2]
        return self._at("name") and bool(after) and after[0].kind == "becomes"

    def _at(self, kind: str, text: str | None = None) -> bool:
        if self._is_over():
            return False
        token = self._tokens[self._next]
        return token.kind == kind and text in (None, token.text)

    def _take(self, kind: str, message: str) -> _Token:
        if not self._at(kind):
            at = len(self._source) if self._is_over() else self._tokens[self._next].at
            _fail(message, self._source, at)
        self._next += 1
        return self._tokens[self._next - 1]

    def _is_over(self) -> bool:
        return self._next >= len(self._tokens)


def _character(piece: str) -> str:
    if not piece.startswith("\\") or len(piece) == 1:
        return piece
    if len(piece) > 2:
        point = int(piece[2:], 16)
        return chr(point) if point < 0x110000 else "\ud800"
    return _SHORT.get(piece[1], piece[1])


def _tokens(source: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            _fail("unexpected text", source, at)
        if match.lastgroup != "space":
            found.append(_Token(match.lastgroup or "", match[0], at))
        at = match.end()
    return found


def _fail(message: str, source: str, at: int) -> NoReturn:
    line = source.count("\n", 0, at) + 1
    raise GbnfError(f"line {line}: {message} at {source[at : at + 20]!r}")


def rules(shape: Shape, writer: Lark) -> str:
    """The expression that accepts what has the form. Raises ShapeRefused."""
    match shape:
        case AnyJson():
            return _json(_OBJECT, shape.param, writer, shape.whitespace)
        case JsonSchema():
            return _json(shape.schema, shape.param, writer, shape.whitespace)
        case Regex():
            return _regex(shape.pattern, writer)
        case Choice():
            return writer.either(map(writer.literal, dict.fromkeys(shape.texts)))
        case Grammar():
            return _grammar(shape, writer)
        case StructuralTag():
            return _tags(shape, writer)
    assert_never(shape)


def shape_refused(error: SchemaRefused) -> ShapeRefused:
    place = below(error.place, error.keyword) if error.keyword else error.place
    return ShapeRefused(error.reason, place)


def _json(
    schema: dict[str, Any] | bool, param: str, writer: Lark, whitespace: str | None = None
) -> str:
    """The expression that accepts JSON of a schema. whitespace: as in JsonSchema."""
    spacing = ONE_LINE if whitespace is None else Spacing(",", ":", whitespace)
    try:
        return json_grammar(writer, schema, spacing, param)
    except SchemaRefused as error:
        raise shape_refused(error) from None


def _regex(pattern: str, writer: Lark) -> str:
    pattern = pattern.removeprefix("^")
    if _END.search(pattern):
        pattern = pattern[:-1]
    return writer.regex(pattern) if pattern else writer.literal("")


def _grammar(shape: Grammar, writer: Lark) -> str:
    if shape.syntax == "lark":
        return writer.nested(shape.source)
    try:
        return gbnf_rules(shape.source, writer)
    except GbnfError as error:
        raise ShapeRefused(str(error), shape.param) from None


def _tags(shape: StructuralTag, writer: Lark) -> str:
    """A structural tag. Free text holds no trigger: each trigger begins one of its tags."""
    triggers = [
        trigger
        for trigger in dict.fromkeys(shape.triggers)
        if not any(trigger != other and trigger.startswith(other) for other in shape.triggers)
    ]
    heads: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for i, tag in enumerate(shape.tags):
        trigger = next((one for one in triggers if tag.begin.startswith(one)), None)
        if trigger is None:
            raise ShapeRefused(
                "expected one of `triggers` at its begin", f"{shape.param}.structures[{i}].begin"
            )
        rest = writer.literal(tag.begin[len(trigger) :])
        body = _json(tag.schema, f"{shape.param}.structures[{i}].schema", writer)
        heads[trigger].append(f"{rest} {body} {writer.literal(tag.end)}")
    found = "|".join(map(re.escape, triggers))
    inside = writer.regex(f"(?s:.*)({found})(?s:.*)")
    free = writer.terminal("free", f"{writer.regex('(?s:.*)')} & ~{inside}")
    tags = [
        writer.rule("head", f"{free} {writer.literal(trigger)}", "lazy")
        + " "
        + writer.either(bodies)
        for trigger, bodies in heads.items()
        if bodies
    ]
    return f"{writer.either(tags)}* {free}"
