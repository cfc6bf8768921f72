"""Parses the regular expressions that module names are written in. Pure.

It is a part of Python's `re`: literals, sets, groups, alternatives, repetition, anchors, looks
ahead and behind.
"""

from dataclasses import dataclass
from typing import Literal

MAX_PATTERN_CHARS = 4096
_MAX_REPEAT = 256
_MAX_NESTING = 32

WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_CLASSES = {
    "d": frozenset("0123456789"),
    "w": WORD,
    "s": frozenset(" \t\n\r\f\v\x1c\x1d\x1e\x1f"),
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
Assertion = Literal["start", "end", "boundary", "inside"]


class PatternError(ValueError):
    """The pattern is malformed, too large, or uses a feature that is not supported. str(): why."""


@dataclass(frozen=True, slots=True)
class Chars:
    """Matches one character: those listed, or all but those."""

    chars: frozenset[str]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Assert:
    kind: Assertion


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Branch:
    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """maximum: None = unbounded."""

    body: "Node"
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """Whether `body` matches from here on (ahead) or up to here (behind), or does not (negated)."""

    body: "Node"
    behind: bool
    negated: bool


Node = Chars | Assert | Concatenation | Branch | Repeat | Look
_LOOKS = {"=": (False, False), "!": (False, True), "<=": (True, False), "<!": (True, True)}


class _Parser:
    """Recursive descent over one pattern. Lazy quantifiers match the same names as greedy ones."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.nesting = 0

    def parse(self) -> Node:
        node = self._branch()
        if self.position != len(self.text):
            raise PatternError(f"unbalanced parenthesis at position {self.position}")
        return node

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise PatternError("the pattern ends too early")
        self.position += 1
        return char

    def _take(self, text: str) -> bool:
        if not self.text.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def _branch(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Branch(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (char := self._peek()) and char not in "|)":
            parts.append(self._repeated(self._atom()))
        return Concatenation(tuple(parts))

    def _repeated(self, body: Node) -> Node:
        bounds = self._quantifier()
        if bounds is None:
            return body
        if isinstance(body, Assert):
            raise PatternError("a repeated anchor")
        if self._peek() == "+":
            raise PatternError("possessive quantifiers are not supported")
        self._take("?")
        after = self.position
        if self._quantifier() is not None:
            raise PatternError(f"multiple repeat at position {after}")
        return Repeat(body, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        char = self._peek()
        if char in simple and char:
            self.position += 1
            return simple[char]
        if char != "{":
            return None
        return self._braces()

    def _braces(self) -> tuple[int, int | None] | None:
        """`{m}`, `{m,}`, `{,n}` or `{m,n}`; any other brace is a literal, as in `re`."""
        end = self.text.find("}", self.position)
        inner = self.text[self.position + 1 : end] if end > 0 else ""
        low, comma, high = inner.partition(",")
        digits = all(part.isascii() and part.isdigit() for part in (low, high) if part)
        if not inner or not digits or (not comma and not low):
            return None
        if len(low) > 4 or len(high) > 4 or max(int(low or 0), int(high or 0)) > _MAX_REPEAT:
            raise PatternError(f"a repetition of more than {_MAX_REPEAT}")
        self.position = end + 1
        minimum = int(low or 0)
        maximum = int(high) if high else (None if comma else minimum)
        if maximum is not None and maximum < minimum:
            raise PatternError("a repetition whose minimum is above its maximum")
        return minimum, maximum

    def _is_quantifier(self) -> bool:
        """Whether the brace that was just read begins one."""
        self.position -= 1
        found = self._braces() is not None
        if not found:
            self.position += 1
        return found

    def _atom(self) -> Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._set()
        if char == "\\":
            return self._escape()
        if char in "*+?" or (char == "{" and self._is_quantifier()):
            raise PatternError("a quantifier with nothing to repeat")
        if char == ".":
            return Chars(frozenset("\n"), negated=True)
        if char in "^$":
            return Assert("start" if char == "^" else "end")
        return Chars(frozenset(char))

    def _group(self) -> Node:
        look = None
        if self._take("?") and not self._take(":"):
            look = next((kind for mark, kind in _LOOKS.items() if self._take(mark)), None)
            if look is None:
                raise PatternError("flags, named and atomic groups are not supported")
        body = self._body()
        return body if look is None else _look(body, *look)

    def _body(self) -> Node:
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            raise PatternError(f"groups nested more than {_MAX_NESTING} deep")
        node = self._branch()
        self.nesting -= 1
        if not self._take(")"):
            raise PatternError("missing ), unterminated group")
        return node

    def _escape(self) -> Node:
        char = self._next()
        anchors: dict[str, Assertion] = {
            "A": "start",
            "Z": "end",
            "b": "boundary",
            "B": "inside",
        }
        if char in anchors:
            return Assert(anchors[char])
        return self._escaped_chars(char)

    def _escaped_chars(self, char: str) -> Chars:
        if char.lower() in _CLASSES:
            return Chars(_CLASSES[char.lower()], negated=char.isupper())
        if char in _CONTROLS:
            return Chars(frozenset(_CONTROLS[char]))
        if char.isascii() and char.isalnum():
            raise PatternError(f"\\{char} is not supported")
        return Chars(frozenset(char))

    def _set(self) -> Chars:
        negated = self._take("^")
        chars: set[str] = set()
        first = True
        while first or self._peek() != "]":
            first = False
            chars |= self._set_item()
        self.position += 1
        return Chars(frozenset(chars), negated)

    def _set_item(self) -> frozenset[str]:
        low = self._set_char()
        if self._peek() != "-" or self.text[self.position + 1 : self.position + 2] in ("]", ""):
            return low
        self.position += 1
        high = self._set_char()
        if len(low) != 1 or len(high) != 1:
            raise PatternError("a class is not the end of a range")
        start, end = ord(min(low)), ord(min(high))
        if start > end or end > 127:
            raise PatternError("a bad character range")
        return frozenset(map(chr, range(start, end + 1)))

    def _set_char(self) -> frozenset[str]:
        char = self._next()
        doubled = char in "-&~|" and self._peek() == char
        if char == "[" or doubled:
            raise PatternError(f"{char!r} within a set must be escaped")
        if char != "\\":
            return frozenset(char)
        escaped = self._escaped_chars(self._next())
        if escaped.negated:
            raise PatternError("a negated class within a set is not supported")
        return escaped.chars


def _look(body: Node, behind: bool, negated: bool) -> Look:
    if behind:
        shortest, longest = _width(body)
        if shortest != longest:
            raise PatternError("a look-behind of no fixed length")
    return Look(body, behind, negated)


def _width(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters that a node matches; None = any number."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Assert | Look):
        return 0, 0
    if isinstance(node, Repeat):
        low, high = _width(node.body)
        most = None if node.maximum is None or high is None else high * node.maximum
        return low * node.minimum, 0 if high == 0 else most
    parts = node.parts if isinstance(node, Concatenation) else node.options
    lows, highs = zip(*map(_width, parts), strict=True) if parts else ((0,), (0,))
    join, most_of = (sum, sum) if isinstance(node, Concatenation) else (min, max)
    known = [high for high in highs if high is not None]
    return join(lows), most_of(known) if len(known) == len(highs) else None


def parse_pattern(text: str) -> Node:
    """The tree of a pattern. Raises PatternError when it is not within the supported language."""
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"longer than {MAX_PATTERN_CHARS} characters")
    return _Parser(text).parse()
