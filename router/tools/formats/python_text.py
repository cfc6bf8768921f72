"""Values of Python or JSON in a text that comes in pieces, as JSON. Pure."""

import json
import re

from loraplex.router.parts.scan import Scan, Steps

_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in ('"', "'")}
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_SIGNS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_DEEPEST = 64
_SIGNS |= {sign: sign for sign in "\"'\\/"}


def python_value(scan: Scan, depth: int = 0) -> Steps[str | None]:
    """Reads one value: its JSON text, None where what comes is none."""
    first = yield from scan.peek()
    if first in ('"', "'") and first:
        text = yield from _string(scan, first)
        return None if text is None else json.dumps(text, ensure_ascii=False)
    if first in ("[", "{") and depth < _DEEPEST:
        return (yield from _items(scan, first, depth + 1))
    word = yield from scan.run(_WORD)
    return word if _NUMBER.fullmatch(word) else _WORDS.get(word)


def _items(scan: Scan, opened: str, depth: int) -> Steps[str | None]:
    """Reads a list or a dict."""
    scan.at += 1
    close = "]" if opened == "[" else "}"
    items: list[str] = []
    while True:
        yield from scan.spaces()
        if (yield from scan.literal(close)):
            return opened + ", ".join(items) + close
        item = yield from python_value(scan, depth)
        if opened == "{" and item is not None:
            item = yield from _member(scan, item, depth)
        if item is None:
            return None
        items.append(item)
        yield from scan.spaces()
        if not (yield from scan.literal(",")) and (yield from scan.peek()) != close:
            return None


def _member(scan: Scan, key: str, depth: int) -> Steps[str | None]:
    yield from scan.spaces()
    if not key.startswith('"') or not (yield from scan.literal(":")):
        return None
    yield from scan.spaces()
    value = yield from python_value(scan, depth)
    return None if value is None else f"{key}: {value}"


def _string(scan: Scan, quote: str) -> Steps[str | None]:
    scan.at += 1
    pieces: list[str] = []
    while True:
        pieces.append((yield from scan.run(_PLAIN[quote])))
        character = yield from scan.peek()
        if not character:
            return None
        scan.at += 1
        if character == quote:
            return _unescaped("".join(pieces))
        escaped = yield from scan.peek()
        scan.at += len(escaped)
        pieces.append(character + escaped)


def _unescaped(text: str) -> str:
    """Halves of a character become the character, or a replacement where one is alone."""
    found = _ESCAPE.sub(_escape, text)
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is not None:
        return chr(int(code, 16)) if int(code, 16) < 0x110000 else "\ufffd"
    return _SIGNS.get(found[4], found[0])
