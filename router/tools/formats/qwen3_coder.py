"""Qwen3-Coder and Qwen 3.5: tags around each argument. Pure."""

import json
from collections.abc import Mapping

from loraplex.router.parts.parts import WHITESPACE, PartsReader, Scan, Steps, StepsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.formats.grammar import free_text_before, mixed, several
from loraplex.router.tools.formats.tagged import LINE, ArgumentTags, Schema, properties
from loraplex.router.tools.tools import Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_TAGS = ArgumentTags("<parameter=", (">",), "</parameter>", padding="\n")


class Qwen3Coder:
    """Calls as Qwen3-Coder writes them.

    <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>

    Arguments that cannot be written one by one stand as one JSON object within the function's
    tags.
    """

    name = "qwen3_coder"
    markers = (_OPEN, _CLOSE)
    short_ids = False

    def reader(self, tools: Tools) -> PartsReader:
        schemas = {tool.name: properties(tool) for tool in tools.allowed}
        return StepsReader(lambda scan: _steps(scan, schemas))

    def rules(self, tools: Tools, lark: Lark) -> str:
        functions = [
            f"{json.dumps(tool.name + '>')} {LINE} {_TAGS.rules(tools, tool, lark)}"
            for tool in tools.allowed
        ]
        function = lark.rule("function", f'{lark.either(functions)} "{_FUNCTION_END}"')
        rest = lark.rule("call", f'{LINE} "{_FUNCTION}" {function} {LINE} {lark.literal(_CLOSE)}')
        if tools.mode == "required":
            return several(tools, f"{lark.literal(_OPEN)} {rest}", LINE)
        marked = f"{free_text_before(lark, _OPEN)} {rest}"
        return mixed(tools, lark, (marked, f"{free_text_before(lark, _FUNCTION)} {function}"))


QWEN3_CODER = Qwen3Coder()


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
        if (yield from _TAGS.arguments(scan, schemas[name], (_FUNCTION_END, _CLOSE))):
            yield from scan.spaces()
            yield from scan.literal(_CLOSE)
            yield from scan.spaces()
            scan.drop_space()
