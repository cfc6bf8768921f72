"""GLM 4.5, 4.6 and 4.7: the name, then tags around the key and value of each argument. Pure."""

import json
from collections.abc import Mapping

from loraplex.router.parts.parts import WHITESPACE, PartsReader, Scan, Steps, StepsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.formats.grammar import free_text_before, mixed, several
from loraplex.router.tools.formats.tagged import LINE, ArgumentTags, Schema, properties
from loraplex.router.tools.tools import Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TAGS = ArgumentTags(_KEY, (_KEY_END, _VALUE), _VALUE_END)


class Glm:
    """Calls as GLM writes them.

    <tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>

    GLM 4.7 leaves the newlines out. Arguments that cannot be written one by one stand as one JSON
    object after the name.
    """

    name = "glm"
    markers = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
    short_ids = False

    def reader(self, tools: Tools) -> PartsReader:
        schemas = {tool.name: properties(tool) for tool in tools.allowed}
        return StepsReader(lambda scan: _steps(scan, schemas))

    def rules(self, tools: Tools, lark: Lark) -> str:
        functions = [
            f"{json.dumps(tool.name)} {LINE} {_TAGS.rules(tools, tool, lark)}"
            for tool in tools.allowed
        ]
        rest = lark.rule("call", f"{lark.either(functions)} {lark.literal(_CLOSE)}")
        if tools.mode == "required":
            return several(tools, f"{lark.literal(_OPEN)} {rest}", LINE)
        return mixed(tools, lark, (f"{free_text_before(lark, _OPEN)} {rest}",))


GLM = Glm()


def _steps(scan: Scan, schemas: Mapping[str, Mapping[str, Schema]]) -> Steps[None]:
    while (yield from scan.until((_OPEN,), scan.text, WHITESPACE)):
        length = scan.at - scan.start
        yield from scan.spaces()
        name = yield from scan.one_of(tuple(schemas))
        yield from scan.spaces()
        word = yield from scan.one_of((_KEY, _CLOSE, "{"))
        if not name or not word:
            scan.reject(length)
            continue
        scan.at -= len(word)
        scan.open_call(name)
        if (yield from _TAGS.arguments(scan, schemas[name], (_CLOSE,))):
            yield from scan.spaces()
            scan.drop_space()
