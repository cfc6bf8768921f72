"""Calls as a list of Python's: Llama 3.2 and 4. Pure."""

import json
import re
from collections.abc import Collection

from loraplex.router.parts.parts import PartsReader, Scan, Steps, StepsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema.json_rules import LOOSE, ONE_LINE, json_grammar
from loraplex.router.tools.formats.grammar import arguments_schema, keeps_schema, one_call_alone
from loraplex.router.tools.formats.tagged import Schema, is_plain, one_type, separate_arguments
from loraplex.router.tools.tools import Tool, Tools

_KEY = re.compile(r"[A-Za-z0-9_]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COMMA = '"," " "?'
_S = r"[ \t\r\n]*"
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in ('"', "'")}
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_SIGNS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_SIGNS |= {sign: sign for sign in "\"'\\/"}
_DEEPEST = 64


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
    """Joins halves of a character to the character; one that is alone becomes a replacement."""
    found = _ESCAPE.sub(_escape, text)
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is not None:
        return chr(int(code, 16)) if int(code, 16) < 0x110000 else "\ufffd"
    return _SIGNS.get(found[4], found[0])


class Pythonic:
    """Calls as in Python: [name(key=value, key="text"), name()], which is the whole answer.

    Values are Python's or JSON. Arguments whose names are no identifiers, or which must keep to
    more than a schema each, stand as `**` and a JSON object.
    """

    name = "pythonic"
    markers = ()
    short_ids = False

    def reader(self, tools: Tools) -> PartsReader:
        names = tuple(tool.name for tool in tools.allowed)
        return StepsReader(lambda scan: _steps(scan, names))

    def rules(self, tools: Tools, lark: Lark) -> str:
        bodies = {
            tool.name: lark.rule("body", body_of_call(tools, tool, lark)) for tool in tools.allowed
        }
        firsts = [f"{json.dumps(f'[{name}(')} {body}" for name, body in bodies.items()]
        more = [f"{json.dumps(f'{name}(')} {body}" for name, body in bodies.items()]
        following = "" if one_call_alone(tools) else f"({_COMMA} {lark.either(more)})*"
        calls = f'{lark.either(firsts)} {following} "]"'
        if tools.mode == "required":
            return calls
        names = "|".join(re.escape(name) for name in bodies)
        text = lark.terminal("TEXT", rf"/(?s:.*)/ & ~/{_S}\[{_S}({names})\((?s:.*)/")
        return lark.either((calls, text))


PYTHONIC = Pythonic()


# Grammar


def body_of_call(tools: Tools, tool: Tool, lark: Lark, *, json_words: bool = False) -> str:
    """The arguments of a call, and the bracket that ends them. json_words: `true`, `false` and
    `null` stand beside Python's words."""
    schema = arguments_schema(tools, tool)
    if not keeps_schema(tools, tool):
        one = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {_value(lark, True, json_words)}'
        return lark.either((f'({one} ({_COMMA} {one})*)? ")"', _in_one(lark, schema)))
    separate = separate_arguments(schema)
    if separate is None or not all(map(_IDENTIFIER.fullmatch, separate)):
        return _in_one(lark, schema)
    required = schema.get("required", ())
    first = later = '")"'  # the arguments that follow, as the first ones and after others
    for name, sub in reversed(separate.items()):
        value = _value(lark, sub, json_words)
        here = lark.rule("argument", f'"{name}=" {value} {later}')
        comma = f"{_COMMA} {here}"
        if name in required:
            first, later = here, lark.rule("later", comma)
        else:
            first = lark.rule("first", lark.either((here, first)))
            later = lark.rule("later", lark.either((comma, later)))
    return first


def _in_one(lark: Lark, schema: Schema) -> str:
    return f'"**" {json_grammar(lark, schema, LOOSE)} ")"'


def _value(lark: Lark, schema: Schema, json_words: bool) -> str:
    python = {"boolean": ("True", "False"), "null": ("None",)}
    kind = one_type(schema)
    if kind in ("boolean", "null") and isinstance(schema, dict) and is_plain(schema):
        words = [f'"{word}"' for word in python[kind]]
        return lark.either([*words, json_grammar(lark, schema)] if json_words else words)
    any_words = ('"True"', '"False"', '"None"') if schema is True else ()
    spacing = LOOSE if schema is True else ONE_LINE
    return lark.either((*any_words, json_grammar(lark, schema, spacing)))


# Reader


def _steps(scan: Scan, names: Collection[str]) -> Steps[None]:
    yield from scan.spaces()
    begun = yield from scan.literal("[")
    while begun:
        yield from scan.spaces()
        name = yield from scan.one_of(tuple(names))
        if not name or not (yield from scan.literal("(")):
            return
        scan.open_call(name)
        if not (yield from read_arguments(scan)):
            yield from read_rest(scan)
            return
        yield from scan.spaces()
        sign = yield from scan.one_of((",", "]"))
        if sign == "]":
            yield from scan.spaces()
            scan.drop_space()
        begun = sign == ","


def read_arguments(scan: Scan) -> Steps[bool]:
    """Reads up to the closing bracket; False where that does not come."""
    yield from scan.spaces()
    if (yield from scan.literal("**")):
        return (yield from _object(scan))
    sign = "{"
    while not (yield from scan.literal(")")):
        key = yield from scan.run(_KEY)
        yield from scan.spaces()
        if not key or not (yield from scan.literal("=")):
            return False
        yield from scan.spaces()
        value = yield from python_value(scan)
        if value is None:
            return False
        scan.arguments(f"{sign}{json.dumps(key)}: {value}")
        scan.drop()
        sign = ", "
        yield from scan.spaces()
        if not (yield from scan.literal(",")) and (yield from scan.peek()) != ")":
            return False
        yield from scan.spaces()
    scan.arguments("{}" if sign == "{" else "}")
    scan.drop()
    return True


def _object(scan: Scan) -> Steps[bool]:
    yield from scan.spaces()
    value = yield from python_value(scan)
    if value is None or not value.startswith("{"):
        return False
    scan.arguments(value)
    yield from scan.spaces()
    yield from scan.literal(")")
    scan.drop()
    return True


def read_rest(scan: Scan) -> Steps[None]:
    """Reads the rest of an answer after arguments that could not be read.

    At the answer's end their last part was cut off, and is dropped. Otherwise that part and all
    that follows are added to the arguments as they are.
    """
    if not (yield from scan.peek()):
        scan.drop()
    yield from scan.all_arguments()
