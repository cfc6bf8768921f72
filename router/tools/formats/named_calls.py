"""Formats whose calls are a function's name and then its arguments as JSON. Pure."""

import json
import re
from collections.abc import Collection

import msgspec

from loraplex.router.parts.parts import WHITESPACE, PartsReader, Scan, Steps, StepsReader
from loraplex.router.shape.lark import Lark
from loraplex.router.tools.formats.grammar import arguments_json, free_text_before, mixed, several
from loraplex.router.tools.formats.json_calls import flowing_value, rest_of_broken
from loraplex.router.tools.tools import Tools

_ID = "/[A-Za-z0-9]{9}/"
_ID_CHARACTERS = re.compile("[A-Za-z0-9_-]*")


class NamedCalls(msgspec.Struct, frozen=True):
    """A format in which calls name their function outside the JSON. A call is `open`, the name,
    `middle`, the arguments, `close`.

    begin, end: what is around all calls, if anything. between: parts calls. markers: of all these,
    what may be special tokens. id_marker: between the name and `middle`, natively before an id of
    the call; models may leave both out. short_ids: ids have nine letters or digits. to_user:
    natively text follows `open` and this, in place of a name; prompts end with the first `open`.
    """

    name: str
    markers: tuple[str, ...]
    open: str
    middle: str
    close: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    id_marker: str = ""
    short_ids: bool = False
    to_user: str = ""

    def reader(self, tools: Tools) -> PartsReader:
        names = tuple(tool.name for tool in tools.allowed)
        return StepsReader(lambda scan: self._steps(scan, names))

    def rules(self, tools: Tools, lark: Lark) -> str:
        close = self._or_nothing(lark, self.close)
        calls = (
            f"{json.dumps(tool.name)} {self._id(lark)} {lark.literal(self.middle)} "
            f"{arguments_json(tools, tool, lark)} {close}"
            for tool in tools.allowed
        )
        function = lark.rule("function", lark.either(calls))
        if self.to_user:
            return self._addressed(tools, lark, function)
        between = self._or_nothing(lark, self.between)
        if self.begin:
            listed = several(tools, f"{lark.literal(self.open)} {function}", between)
            rest = lark.rule("calls", f"{listed} {lark.literal(self.end)}")
        else:
            rest = function
        marker = self.begin or self.open
        if tools.mode != "required":
            return mixed(tools, lark, (f"{free_text_before(lark, marker)} {rest}",))
        one = f"{lark.literal(marker)} {rest}"
        return one if self.begin else several(tools, one, between)

    def _addressed(self, tools: Tools, lark: Lark, function: str) -> str:
        """The expression for answers of which each part names whom it is for."""
        begin = f"({lark.literal(self.open)})?"
        calls = f"{begin} {several(tools, function, lark.literal(self.open))}"
        if tools.mode == "required":
            return calls
        called = f"{free_text_before(lark, self.open)} {function}"
        text = f"{lark.literal(self.to_user)} {mixed(tools, lark, (called,))}"
        return lark.either((calls, f"{begin} {text}"))

    def _id(self, lark: Lark) -> str:
        return f"{lark.literal(self.id_marker)} {_ID}" if self.id_marker else ""

    def _or_nothing(self, lark: Lark, text: str) -> str:
        return lark.literal(text) if text else ""

    def _steps(self, scan: Scan, names: Collection[str]) -> Steps[None]:
        marker = self.begin or self.open
        if self.to_user:
            yield from self._first(scan, names)
        while (yield from scan.until((marker,), scan.text, WHITESPACE)):
            length = scan.at - scan.start
            if self.to_user and (yield from scan.literal(self.to_user)):
                scan.drop_space()
            elif not (yield from self._calls(scan, names)):
                scan.reject(length)

    def _first(self, scan: Scan, names: Collection[str]) -> Steps[None]:
        """Reads what stands at the begin where the prompt ends with `open`."""
        yield from scan.literal(self.open)
        if (yield from scan.literal(self.to_user)):
            scan.drop()
        elif not (yield from self._calls(scan, names)):
            scan.reject(0)

    def _calls(self, scan: Scan, names: Collection[str]) -> Steps[bool]:
        """Reads the calls after a marker; False where there is none."""
        if self.begin:
            yield from scan.spaces()
            if not (yield from scan.literal(self.open)):
                return False
        if not (yield from self._call(scan, names)):
            return False
        while self.begin:
            yield from scan.spaces()
            if not (yield from scan.literal(self.open)) or not (yield from self._call(scan, names)):
                scan.at = scan.start
                break
        yield from self._pass(scan, self.end)
        yield from scan.spaces()
        scan.drop_space()
        return True

    def _call(self, scan: Scan, names: Collection[str]) -> Steps[bool]:
        """Reads a call from its name on; False where none comes."""
        name = yield from scan.one_of(tuple(names))
        if not name:
            return False
        if self.id_marker and (yield from scan.literal(self.id_marker)):
            yield from scan.run(_ID_CHARACTERS)
        if not (yield from scan.literal(self.middle)):
            return False
        yield from scan.spaces()
        if (yield from scan.peek()) != "{":
            return False
        scan.open_call(name)
        if (yield from flowing_value(scan)):
            yield from self._pass(scan, self.close)
        else:
            yield from rest_of_broken(scan, self.close)
        return True

    def _pass(self, scan: Scan, end: str) -> Steps[None]:
        """Drops what ends a call or all calls, if it comes."""
        yield from scan.spaces()
        if end and (yield from scan.literal(end.strip())):
            scan.drop()
        scan.at = scan.start
