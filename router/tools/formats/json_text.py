"""JSON in a text that comes in pieces. Pure."""

import json
import re

from loraplex.router.parts.scan import Scan, Steps

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_SCALARS = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_CLOSES = {"{": "}", "[": "]"}
_VALUES = "value", "first value"
_KEYS = "key", "first key"


def json_value(scan: Scan) -> Steps[bool]:
    """Reads one value; False where what comes is none: what comes before that is read.

    Where the text flows into arguments, control characters within strings become escapes.
    """
    opened: list[str] = []
    wanted = "value"
    while wanted != "next" or opened:
        yield from scan.spaces()
        character = yield from scan.peek()
        following = _after_sign(wanted, character, opened)
        if following:
            scan.at += 1
        elif wanted in _KEYS and character == '"':
            following = "colon" if (yield from json_string(scan)) else ""
        elif wanted in _VALUES:
            following = "next" if (yield from _plain_value(scan, character)) else ""
        if not following:
            return False
        wanted = following
    return True


def flowing_value(scan: Scan) -> Steps[bool]:
    """Reads one value, which flows into the arguments; False where it is none."""
    scan.flows = True
    whole = yield from json_value(scan)
    scan.arguments()
    scan.flows = False
    return whole


def rest_of_broken(scan: Scan, close: str) -> Steps[None]:
    """Adds all up to what closes a broken call to its arguments."""
    if close:
        yield from scan.until((close,), scan.arguments)
        scan.drop()
    else:
        yield from scan.all_arguments()


def _after_sign(wanted: str, sign: str, opened: list[str]) -> str:
    """The next thing that is wanted after the sign; "" where the sign may not come. opened: { and [
    so far."""
    if wanted in _VALUES and sign in ("{", "["):
        opened.append(sign)
        return "first key" if sign == "{" else "first value"
    if wanted == "colon":
        return "value" if sign == ":" else ""
    if opened and wanted in ("next", "first key", "first value") and sign == _CLOSES[opened[-1]]:
        opened.pop()
        return "next"
    if wanted == "next" and sign == ",":
        return "key" if opened[-1] == "{" else "value"
    return ""


def _plain_value(scan: Scan, first: str) -> Steps[bool]:
    if first == '"':
        return (yield from json_string(scan))
    return bool(_SCALARS.fullmatch((yield from scan.run(_SCALAR))))


def json_string(scan: Scan) -> Steps[bool]:
    """Reads a string of which the quote comes next; False where it breaks off."""
    scan.at += 1
    while True:
        yield from scan.run(_PLAIN)
        character = yield from scan.peek()
        if not character:
            return False
        if character == "\\":
            if not (yield from _escape(scan)):
                return False
            continue
        if character == '"' or not scan.flows:
            scan.at += 1
        else:
            _pass_on_escaped(scan)
        if character == '"':
            return True


def _escape(scan: Scan) -> Steps[str]:
    """Reads an escape: its text, "" where it is none."""
    begin = scan.at
    flows, scan.flows = scan.flows, False
    if scan.start < begin and flows:
        scan.arguments()
    offset = scan.at - scan.start
    scan.at += 1
    character = yield from scan.peek()
    scan.at += len(character)
    valid = bool(character) and character in '"\\/bfnrtu'
    for _ in range(4 if character == "u" else 0):
        digit = yield from scan.peek()
        valid = valid and digit in "0123456789abcdefABCDEF" and bool(digit)
        scan.at += 1 if valid else 0
    scan.flows = flows
    return scan.since(offset) if valid else ""


def _pass_on_escaped(scan: Scan) -> None:
    """Passes the next character to the arguments as its escape."""
    scan.arguments()
    scan.at += 1
    scan.arguments(escaped(scan.since(0)))
    scan.drop()


def escaped(text: str) -> str:
    """Writes control characters as escapes."""
    return _CONTROL.sub(lambda found: json.dumps(found.group())[1:-1], text)


def repaired(value: str) -> str:
    """Writes control characters in a read value's strings as escapes."""
    return _STRING.sub(lambda found: escaped(found.group()), value)


def string_text(scan: Scan) -> Steps[bool]:
    """Reads a string of which the quote comes next; its content flows into the arguments."""
    scan.at += 1
    scan.drop()
    pending = ""  # an escape that may be the first half of a character
    while True:
        scan.flows = not pending
        yield from scan.run(_PLAIN)
        scan.flows = False
        character = yield from scan.peek()
        if scan.start < scan.at or character != "\\":
            scan.arguments(_content(pending))
            scan.arguments()
            pending = ""
        if character == "\\":
            escape = yield from _escape(scan)
            if not escape:
                scan.arguments(_content(pending))
                return False
            scan.drop()
            pending += escape
            if not _is_half(pending):
                scan.arguments(_content(pending))
                pending = ""
            continue
        scan.at += len(character)
        if not character or character == '"':
            scan.drop()
            return bool(character)
        scan.arguments()


def _is_half(escape: str) -> bool:
    return len(escape) == 6 and 0xD800 <= ord(json.loads(f'"{escape}"')) < 0xDC00


def _content(escapes: str) -> str:
    """The text that the escapes stand for; a half of a character is replaced."""
    text: str = json.loads(f'"{escapes}"')
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
