"""Qwen3-Coder and Qwen 3.5: tags around each argument. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

from router.parts.parts import PartsReader
from router.parts.scan import WHITESPACE, Scan, Steps, StepsReader
from router.shape.lark import Lark
from router.tools.formats.grammar import (
    arguments_schema,
    free_text_before,
    keeps_schema,
    mixed,
    several,
)
from router.tools.formats.json_text import json_value
from router.tools.formats.parameters import Schema, is_text, one_type, separate_arguments
from router.tools.tools import Tool, Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NOT_LATER = r"~/(?s:.*)<\/parameter>(?s:.+)/"
_LINE = '"\\n"?'


class Qwen3Coder:
    """<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>

    Texts stand as they are, other values as JSON. Arguments that cannot be written one by one
    stand as one JSON object within the function's tags.
    """

    name = "qwen3_coder"
    markers = (_OPEN, _CLOSE)
    short_ids = False

    def reader(self, tools: Tools) -> PartsReader:
        schemas = {tool.name: _properties(tool) for tool in tools.allowed}
        return StepsReader(lambda scan: _steps(scan, schemas))

    def rules(self, tools: Tools, lark: Lark) -> str:
        functions = [
            f"{json.dumps(tool.name + '>')} {_LINE} {_body(tools, tool, lark)}"
            for tool in tools.allowed
        ]
        function = lark.rule("function", f'{lark.either(functions)} "{_FUNCTION_END}"')
        rest = lark.rule("call", f'{_LINE} "{_FUNCTION}" {function} {_LINE} {lark.literal(_CLOSE)}')
        if tools.mode == "required":
            return several(tools, f"{lark.literal(_OPEN)} {rest}", _LINE)
        marked = f"{free_text_before(lark, _OPEN)} {rest}"
        return mixed(tools, lark, (marked, f"{free_text_before(lark, _FUNCTION)} {function}"))


QWEN3_CODER = Qwen3Coder()


def _properties(tool: Tool) -> Mapping[str, Schema]:
    found: dict[str, Schema] = (tool.parameters or {}).get("properties", {})
    return found


# Grammar


def _body(tools: Tools, tool: Tool, lark: Lark) -> str:
    """All arguments of a call."""
    if not keeps_schema(tools, tool):
        return f"(/<parameter=[^<>\\n]{{1,128}}>\\n/ {_text(lark)} {_LINE})*"
    schema = arguments_schema(tools, tool)
    separate = separate_arguments(schema)
    if separate is None or not all(name and _NAME.fullmatch(name) for name in separate):
        return f"{lark.json(schema)} {_LINE}"
    required = schema.get("required", ())
    return " ".join(
        f"({_parameter(lark, name, sub)}){'' if name in required else '?'}"
        for name, sub in separate.items()
    )


def _parameter(lark: Lark, name: str, schema: Schema) -> str:
    begin = json.dumps(f"{_PARAMETER}{name}>\n", ensure_ascii=False)
    if isinstance(schema, dict) and is_text(schema):
        return f"{begin} {_text(lark, schema)} {_LINE}"
    return f'{begin} {lark.json(schema)} "\\n{_PARAMETER_END}" {_LINE}'


def _text(lark: Lark, schema: dict[str, Any] | None = None) -> str:
    """A text and the end of its tag."""
    schema = schema or {}
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if texts is not None:
        ends = (json.dumps(f"{text}\n{_PARAMETER_END}", ensure_ascii=False) for text in texts)
        return lark.either(ends)
    length = f"{{{least},{most}}}" if least or most != "" else "*"
    return lark.terminal("TEXT", rf"/(?s:.{length})\n<\/parameter>/ & {_NOT_LATER}")


# Reader


def _steps(scan: Scan, schemas: Mapping[str, Mapping[str, Schema]]) -> Steps[None]:
    while word := (yield from scan.until((_OPEN, _FUNCTION), scan.text, WHITESPACE)):
        length = scan.at - scan.start
        if word == _OPEN:
            yield from scan.spaces()
            yield from scan.literal(_FUNCTION)
        name = yield from scan.one_of(tuple(schemas))
        if not name or not (yield from scan.literal(">")):
            scan.reject(length)
            continue
        scan.open_call(name)
        if (yield from _arguments(scan, schemas[name])):
            yield from scan.spaces()
            yield from scan.literal(_CLOSE)
            yield from scan.spaces()
            scan.drop_space()


def _arguments(scan: Scan, schemas: Mapping[str, Schema]) -> Steps[bool]:
    """Reads up to the function's end; False where the answer ends before."""
    yield from scan.spaces()
    scan.drop()
    if (yield from scan.peek()) == "{":
        scan.flows = True
        yield from json_value(scan)
        scan.arguments()
        scan.flows = False
        return bool((yield from scan.until((_FUNCTION_END,), scan.drop)))
    sign = "{"
    while True:
        word = yield from scan.until((_PARAMETER, _FUNCTION_END, _CLOSE), scan.drop)
        scan.drop()
        if word != _PARAMETER:
            if word:
                scan.arguments("{}" if sign == "{" else "}")
            return bool(word)
        name = yield from scan.run(_NAME)
        if not (yield from scan.literal(">")):
            continue
        scan.arguments(f"{sign}{json.dumps(name, ensure_ascii=False)}: ")
        sign = ", "
        yield from scan.literal("\n")
        scan.drop()
        if not (yield from _value(scan, schemas.get(name))):
            return False


def _value(scan: Scan, schema: Schema | None) -> Steps[bool]:
    """Reads a value and the end of its tag; False where the answer ends before."""
    if is_text(schema):
        scan.arguments('"')
        ended = yield from scan.until(_ENDS, lambda: _give_text(scan))
        scan.drop()
        if ended:
            scan.arguments('"')
        return bool(ended)
    yield from json_value(scan)
    value = scan.since(0)
    yield from scan.spaces()
    if not (yield from scan.literal(_PARAMETER_END)):
        scan.at = scan.start
        ended = yield from scan.until(_ENDS, lambda: None)
        if not ended:
            scan.drop()
            return False
        value = scan.since(0).removesuffix(ended)
    scan.drop()
    scan.arguments(_as_json(value, schema))
    return True


_ENDS = f"\n{_PARAMETER_END}", _PARAMETER_END
_PARTIAL_END = re.compile(r"\n?(<(/(p(a(r(a(m(e(t(er?)?)?)?)?)?)?)?)?)?)?\Z")


def _give_text(scan: Scan) -> None:
    text = scan.since(0)
    if scan.closed and scan.at == len(scan.buffer):  # perhaps within the tag's end
        text = _PARTIAL_END.sub("", text)
    scan.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
    scan.drop()


def _as_json(text: str, schema: Schema | None) -> str:
    """JSON stays; Python's words become JSON's; another text is a string."""
    stripped = text.strip()
    found = _PYTHON.get(stripped, stripped)
    try:
        value = json.loads(found, parse_constant=_refuse)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    is_string = one_type(schema) == "string"
    return (
        json.dumps(text, ensure_ascii=False) if is_string and not isinstance(value, str) else found
    )


def _refuse(constant: str) -> None:
    raise ValueError(constant)
