"""OLMo 3. Pure."""

import json
from collections.abc import Collection

from loraplex.router.parts.parts import WHITESPACE, PartsReader, Scan, Steps, StepsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.formats.grammar import free_text_before, mixed, several
from loraplex.router.tools.formats.pythonic import body_of_call, read_arguments, read_rest
from loraplex.router.tools.tools import Tools

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"
_LINE = r"/[ \t]*\n?/"


class Olmo3:
    """Calls as OLMo 3 writes them: <function_calls>, one call a line as in Python,
    </function_calls>. Words are Python's or JSON's.
    """

    name = "olmo3"
    markers = (_OPEN, _CLOSE)
    short_ids = False

    def reader(self, tools: Tools) -> PartsReader:
        names = tuple(tool.name for tool in tools.allowed)
        return StepsReader(lambda scan: _steps(scan, names))

    def rules(self, tools: Tools, lark: Lark) -> str:
        calls = (
            f"{json.dumps(f'{tool.name}(')} {body_of_call(tools, tool, lark, json_words=True)}"
            for tool in tools.allowed
        )
        call = lark.rule("call", lark.either(calls))
        rest = f"{_LINE} {several(tools, call, _LINE)} {_LINE} {lark.literal(_CLOSE)}"
        if tools.mode == "required":
            return f"{lark.literal(_OPEN)} {rest}"
        return mixed(tools, lark, (f"{free_text_before(lark, _OPEN)} {rest}",))


OLMO3 = Olmo3()


def _steps(scan: Scan, names: Collection[str]) -> Steps[None]:
    while (yield from scan.until((_OPEN,), scan.text, WHITESPACE)):
        length = scan.at - scan.start
        if not (yield from _calls(scan, names)):
            scan.reject(length)


def _calls(scan: Scan, names: Collection[str]) -> Steps[bool]:
    """Reads the calls after the marker; False where there is none."""
    found = False
    while True:
        yield from scan.spaces()
        if found and (yield from scan.literal(_CLOSE)):
            yield from scan.spaces()
            scan.drop_space()
            return True
        name = yield from scan.one_of(tuple(names))
        if not name or not (yield from scan.literal("(")):
            if found:
                scan.at = scan.start
            return found
        found = True
        scan.open_call(name)
        if not (yield from read_arguments(scan)):
            yield from read_rest(scan)
            return True
