"""`pattern` of JSON Schema, for llguidance. Pure.

ECMA 262, Python's `re` and Rust's `regex` read some expressions differently. What comes out
matches only texts that ECMA 262 and Python both accept; what has no such reading is refused.
"""

from collections.abc import Callable

_WORD = r"A-Za-z0-9_"
_ANY_WORD = r"\p{L}\p{N}\p{M}_"
_SPACE = r" \t\n\r\f\v"
_ANY_SPACE = r"\s\x1c-\x1f\x{85}\x{feff}"
# Of each class: the characters that are in it for certain, and those that may be.
_SURE = {
    "d": "0-9",
    "w": _WORD,
    "s": _SPACE,
    "D": r"[^\p{Nd}]",
    "W": f"[^{_ANY_WORD}]",
    "S": f"[^{_ANY_SPACE}]",
}
_POSSIBLE = {
    "d": r"\p{Nd}",
    "w": _ANY_WORD,
    "s": _ANY_SPACE,
    "D": "[^0-9]",
    "W": f"[^{_WORD}]",
    "S": f"[^{_SPACE}]",
}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_META = frozenset("\\.+*?()|[]{}^$#&-~/")
_NO_LINE_END = r"[^\n\r\x{2028}\x{2029}]"


class PatternRefused(ValueError):
    """str() says why."""


def portable(pattern: str) -> str:
    """The pattern for llguidance; it may match anywhere in a text. Raises PatternRefused."""
    return _Reader(pattern).read()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> str:
        out: list[str] = []
        while self._at < len(self._pattern):
            out.append(self._piece())
        if self._depth:
            raise PatternRefused("a group is not closed")
        return "".join(out)

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise PatternRefused("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _peek(self, count: int = 1) -> str:
        return self._pattern[self._at : self._at + count]

    def _piece(self) -> str:
        character = self._next()
        if character in "*+?":
            raise PatternRefused(f"`{character}` repeats nothing")
        if character == "{":
            raise PatternRefused("write a `{` that is text as `\\{`")
        if character in "^$|":
            return character
        if character == "(":
            return self._open()
        if character == ")":
            self._depth -= 1
            if self._depth < 0:
                raise PatternRefused("a `)` closes no group")
            return ")" + self._repeat()
        return self._atom(character) + self._repeat()

    def _open(self) -> str:
        self._depth += 1
        if self._peek() != "?":
            return "(?:"
        start = self._pattern[self._at - 1 :][:4]
        if self._peek(2) != "?:":
            raise PatternRefused(f"`{start}`: lookarounds, named groups and flags have no place")
        self._at += 2
        return "(?:"

    def _atom(self, character: str) -> str:
        if character == ".":
            return _NO_LINE_END
        if character == "[":
            return self._class()
        if character != "\\":
            return _literal(character)
        if self._peek() and self._peek() in _SURE:
            return f"[{_SURE[self._next()]}]"
        return _literal(self._escaped())

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

    def _repeat(self) -> str:
        """A quantifier, if one follows; lazy ones match the same texts."""
        found = self._peek()
        if not found or found not in "*+?{":
            return ""
        self._at += 1
        if found == "{":
            found = self._bounds()
        if self._peek() == "?":
            self._at += 1
        if self._peek() and self._peek() in "*+?{":
            raise PatternRefused("a repetition is repeated")
        return found

    def _bounds(self) -> str:
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at : max(end, self._at)].partition(",")
        self._at = end + 1
        if end < 0 or not is_count(low) or not (high == "" or is_count(high)):
            raise PatternRefused("write a `{` that is text as `\\{`")
        if high and int(low) > int(high):
            raise PatternRefused(f"`{{{low},{high}}}` repeats nothing")
        return f"{{{low}{comma}{high}}}"

    def _class(self) -> str:
        negated = self._peek() == "^"
        self._at += negated
        if self._peek() == "]":
            raise PatternRefused("a class of characters is empty")
        classes = _POSSIBLE if negated else _SURE
        out: list[str] = []
        while (character := self._next()) != "]":
            out.append(self._member(character, classes))
        return f"[{'^' if negated else ''}{''.join(out)}]"

    def _member(self, character: str, classes: dict[str, str]) -> str:
        if character == "\\" and self._peek() and self._peek() in classes:
            found = classes[self._next()]
            if self._peek() == "-" and self._peek(2) != "-]":
                raise PatternRefused("write a `-` that is text as `\\-`")
            return found
        first = self._escaped() if character == "\\" else character
        if self._peek() != "-" or self._peek(2) in ("-]", "-"):
            return _literal(first)
        self._at += 1
        last = self._next()
        if last == "\\":
            if self._peek() and self._peek() in classes:
                raise PatternRefused("write a `-` that is text as `\\-`")
            last = self._escaped()
        if first > last:
            raise PatternRefused(f"`{first}-{last}` is no range")
        return f"{_literal(first)}-{_literal(last)}"


_is_hex: Callable[[str], bool] = frozenset("0123456789abcdefABCDEF").issuperset


def is_count(text: str) -> bool:
    """Whether it spells a number that a pattern or a place in a list can have."""
    return text.isascii() and text.isdigit() and len(text) < 7


def _literal(character: str) -> str:
    if character < " " or "\x7f" <= character <= "\x9f":
        return f"\\x{{{ord(character):x}}}"
    return "\\" + character if character in _META else character
