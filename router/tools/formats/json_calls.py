"""Formats whose calls are JSON objects that name their functions, and the reading of JSON in
pieces. Pure."""

import json
import re
from collections.abc import Collection
from enum import Enum

import msgspec

from loraplex.router.parts.parts import WHITESPACE, PartsReader, Scan, Steps, StepsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.formats.grammar import arguments_json, free_text_before, mixed, several
from loraplex.router.tools.tools import Tools

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_SCALARS = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_CLOSES = {"{": "}", "[": "]"}
_VALUES = "value", "first value"
_KEYS = "key", "first key"

_QUOTE = '"'
_COMMA = '"," " "?'
_COLON = '":" " "?'
_NAME_AND_QUOTE = f'"\\"name\\"" {_COLON} "\\""'
_ID = f'"\\"id\\"" {_COLON} /"[A-Za-z0-9]{{9}}"/'
_S = r"[ \t\r\n]*"
# The begin of a call without marker, as `CallObject` reads calls.
_BARE_BEGIN = rf'/(?s:.*)\{{{_S}("type"{_S}:{_S}"function"{_S},{_S})?"name"{_S}:{_S}"/'

NAME_KEYS = "name", "tool_name"
ARGUMENT_KEYS = "arguments", "parameters"


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


class CallOutcome(Enum):
    """How reading a call ended. none: it was no call. broken: its arguments break off."""

    NONE = "none"
    CALL = "call"
    BROKEN = "broken"


class CallObject:
    """Reads `{"name": …, "arguments": {…}}`, its members in any order.

    names: functions that may be called. bare: no marker says that a call comes. Then the members
    are the name and the arguments, in this order; some models write `"type": "function"` first. The
    arguments flow.
    """

    def __init__(self, scan: Scan, names: Collection[str], bare: bool) -> None:
        self._scan = scan
        self._names = names
        self._bare = bare
        self._name = ""
        self._held = ""  # arguments that came before the name
        self._opened = False
        self._whole = False

    def read(self) -> Steps[CallOutcome]:
        if not (yield from self._scan.literal("{")):
            return CallOutcome.NONE
        while (yield from self._member()):
            yield from self._scan.spaces()
            sign = yield from self._scan.one_of((",", "}"))
            if sign == "}":
                return self._finish()
            if not sign:
                break
        if self._whole:
            return CallOutcome.CALL
        return CallOutcome.BROKEN if self._opened else CallOutcome.NONE

    def _member(self) -> Steps[bool]:
        yield from self._scan.spaces()
        offset = self._scan.at - self._scan.start
        key = yield from self._string()
        if self._bare and not self._opened and self._scan.since(offset) != f'"{key}"':
            return False  # an escape in the key
        yield from self._scan.spaces()
        if key is None or not (yield from self._scan.literal(":")):
            return False
        yield from self._scan.spaces()
        if key in NAME_KEYS and not self._name:
            return (yield from self._read_name())
        if key in ARGUMENT_KEYS and not self._opened:
            return (yield from self._read_arguments())
        if self._bare and not self._opened:
            return key == "type" and (yield from self._scan.literal('"function"'))
        return (yield from json_value(self._scan))

    def _string(self) -> Steps[str | None]:
        offset = self._scan.at - self._scan.start
        if (yield from self._scan.peek()) != '"' or not (yield from json_string(self._scan)):
            return None
        text: str = json.loads(self._scan.since(offset), strict=False)
        return text

    def _read_name(self) -> Steps[bool]:
        name = yield from self._string()
        if name is None or name not in self._names:
            return False
        self._name = name
        if self._held:
            self._open()
            self._scan.arguments(self._held)
            self._whole = True
        return True

    def _read_arguments(self) -> Steps[bool]:
        first = yield from self._scan.peek()
        if not self._name:
            return (yield from self._hold_arguments(first))
        if first not in ("{", '"'):
            return (yield from self._scan.literal("null"))
        self._open()
        if first == "{":
            self._whole = yield from flowing_value(self._scan)
        else:
            self._whole = yield from string_text(self._scan)
        return self._whole

    def _hold_arguments(self, first: str) -> Steps[bool]:
        offset = self._scan.at - self._scan.start
        if self._bare or first not in ("{", '"'):
            return False
        if not (yield from json_value(self._scan)):
            return False
        raw = self._scan.since(offset)
        self._held = repaired(raw) if first == "{" else json.loads(raw, strict=False)
        return True

    def _open(self) -> None:
        self._opened = True
        self._scan.open_call(self._name)

    def _finish(self) -> CallOutcome:
        if not self._name or (self._bare and not self._opened):
            return CallOutcome.NONE
        if not self._opened:
            self._open()
            self._scan.arguments("{}")
        self._scan.drop()
        return CallOutcome.CALL


class JsonCalls(msgspec.Struct, frozen=True):
    """A format in which calls are JSON objects. opens: markers that begin calls; one that ends in a
    bracket has begun their array. close: what ends calls, if anything.

    bare: a call may come without its marker. listed: natively calls stand in a JSON array, else
    each has its own markers, or `between` parts them. lines: natively objects stand on lines of
    their own. arguments_key: the native one. ids: natively an object ends with an id. short_ids:
    ids have nine letters or digits.
    """

    name: str
    opens: tuple[str, ...]
    close: str = ""
    bare: bool = False
    listed: bool = False
    between: str = ""
    lines: bool = False
    arguments_key: str = "arguments"
    ids: bool = False
    short_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, self.close) if self.close else self.opens

    def reader(self, tools: Tools) -> PartsReader:
        names = frozenset(tool.name for tool in tools.allowed)
        return StepsReader(lambda scan: self._steps(scan, names))

    def rules(self, tools: Tools, lark: Lark) -> str:
        function = self._function(tools, lark)
        call = lark.rule("object", f'"{{" {_NAME_AND_QUOTE} {function}')
        rests = [lark.rule("rest", self._rest(tools, lark, marker, call)) for marker in self.opens]
        marked = list(zip(self.opens, rests, strict=True))
        if tools.mode == "required":
            ways = [f"{lark.literal(marker)} {rest}" for marker, rest in marked]
            ways += [several(tools, call, self._separator())] if self.bare else []
            return (
                several(tools, lark.either(ways), self._gap()) if self.close else lark.either(ways)
            )
        called = [f"{free_text_before(lark, marker)} {rest}" for marker, rest in marked]
        if not self.bare:
            return mixed(tools, lark, called)
        begin = lark.rule("before", _BARE_BEGIN, "lazy")
        return mixed(
            tools, lark, [*called, f"{begin} {function}"], [f"{begin} {_other(tools, lark)}"]
        )

    def _rest(self, tools: Tools, lark: Lark, marker: str, call: str) -> str:
        """The expression for what follows a marker."""
        close = lark.literal(self.close) if self.close else ""
        if self.listed:
            bracket = "" if marker.endswith("[") else '" "? "["'
            ended = f"({close})?" if close else ""
            return f'{bracket} {several(tools, call, _COMMA)} "]" {ended}'
        if self.between:
            return several(tools, call, self._separator())
        return f"{self._gap()} {call} {self._gap()} {close}"

    def _gap(self) -> str:
        return '"\\n"?' if self.lines else '" "?'

    def _separator(self) -> str:
        return f'{json.dumps(self.between)} " "?'

    def _function(self, tools: Tools, lark: Lark) -> str:
        """One call as an object, from its function's name on."""
        last = f"({_COMMA} {_ID})?" if self.ids else ""
        key = json.dumps(f'"{self.arguments_key}"')
        calls = (
            f"{json.dumps(tool.name + _QUOTE)} {_COMMA} {key} "
            f'{_COLON} {arguments_json(tools, tool, lark)} {last} "}}"'
            for tool in tools.allowed
        )
        return lark.rule("function", lark.either(calls))

    def _steps(self, scan: Scan, names: Collection[str]) -> Steps[None]:
        triggers = (*self.opens, "{") if self.bare else self.opens
        while word := (yield from scan.until(triggers, scan.text, WHITESPACE)):
            length = scan.at - scan.start
            if word == "{":
                scan.at -= 1
            if (yield from self._calls(scan, names, word)):
                yield from scan.spaces()
                scan.drop_space()
            else:
                scan.reject(length)

    def _calls(self, scan: Scan, names: Collection[str], word: str) -> Steps[bool]:
        """Reads calls up to their close; False where there is none. word: what began them."""
        yield from scan.spaces()
        listed = word.endswith("[") or (yield from scan.literal("["))
        yield from scan.spaces()
        outcome = yield from CallObject(scan, names, word == "{").read()
        if outcome is CallOutcome.NONE:
            return False
        while outcome is CallOutcome.CALL and (yield from self._another(scan, listed)):
            outcome = yield from CallObject(scan, names, self.bare).read()
        if outcome is CallOutcome.BROKEN:
            yield from rest_of_broken(scan, self.close)
            return True
        scan.at = scan.start
        yield from self._ends(scan, listed)
        return True

    def _another(self, scan: Scan, listed: bool) -> Steps[bool]:
        """Whether another object follows; reads what parts it from the last."""
        yield from scan.spaces()
        parted = yield from scan.one_of((",", ";") if listed or self.bare else (",",))
        yield from scan.spaces()
        return (parted != "" or not self.bare) and (yield from scan.peek()) == "{"

    def _ends(self, scan: Scan, listed: bool) -> Steps[None]:
        for end in ("]" if listed else "", self.close):
            yield from scan.spaces()
            if end and (yield from scan.literal(end)):
                scan.drop()
            scan.at = scan.start


def _other(tools: Tools, lark: Lark) -> str:
    """The expression for the rest of a name that no tool has."""
    names = "|".join(re.escape(tool.name) for tool in tools.allowed)
    return lark.terminal("OTHER", f'/[^"{{\\\\]*"/ & ~/({names})"/')
