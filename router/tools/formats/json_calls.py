"""Formats whose calls are JSON objects that name their functions. Pure."""

import json
from collections.abc import Collection

import msgspec

from router.parts.parts import PartsReader
from router.parts.scan import WHITESPACE, Scan, Steps, StepsReader
from router.shape.lark import Lark
from router.tools.formats.call_object import CallObject, Outcome
from router.tools.formats.grammar import arguments_schema, marked_calls
from router.tools.tools import Tools


class JsonCalls(msgspec.Struct, frozen=True):
    """opens: markers that begin calls, the native one first. close: what ends them, if anything.

    bare: a call may come without its marker. listed: natively calls stand in a JSON array, else
    each has its own markers, or `between` parts them. lines: natively objects stand on lines of
    their own. arguments_key: the native one.
    """

    name: str
    opens: tuple[str, ...]
    close: str = ""
    bare: bool = False
    listed: bool = False
    between: str = ""
    lines: bool = False
    arguments_key: str = "arguments"

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, self.close) if self.close else self.opens

    def reader(self, tools: Tools) -> PartsReader:
        names = frozenset(tool.name for tool in tools.allowed)
        return StepsReader(lambda scan: self._steps(scan, names))

    def rules(self, tools: Tools, lark: Lark) -> str:
        space = '"\\n"?' if self.lines else '" "?'
        rest = lark.rule(
            "call", f"{space} {self._object(tools, lark)} {space} {lark.literal(self.close)}"
        )
        return marked_calls(tools, lark, self.opens[0], rest, space)

    def _object(self, tools: Tools, lark: Lark) -> str:
        """One call as an object."""
        calls = (
            f'{lark.literal(json.dumps(tool.name))} "," " "? "\\"{self.arguments_key}\\":" " "? '
            f"{lark.json(arguments_schema(tools, tool))}"
            for tool in tools.allowed
        )
        return lark.rule("object", f'"{{" "\\"name\\":" " "? {lark.either(calls)} "}}"')

    def _steps(self, scan: Scan, names: Collection[str]) -> Steps[None]:
        triggers = (*self.opens, "{") if self.bare else self.opens
        while word := (yield from scan.until(triggers, scan.text, WHITESPACE)):
            length = scan.at - scan.start
            if word == "{":
                scan.at -= 1
            if (yield from self._calls(scan, names, word == "{")):
                yield from scan.spaces()
                scan.drop_space()
            else:
                scan.reject(length)

    def _calls(self, scan: Scan, names: Collection[str], bare: bool) -> Steps[bool]:
        """Reads calls up to their close; False where there is none."""
        yield from scan.spaces()
        listed = yield from scan.literal("[")
        yield from scan.spaces()
        outcome = yield from CallObject(scan, names, bare).read()
        if outcome is Outcome.NONE:
            return False
        while outcome is Outcome.CALL and (yield from self._another(scan, listed)):
            outcome = yield from CallObject(scan, names, bare).read()
        if outcome is Outcome.BROKEN:
            yield from self._rest_of_broken(scan)
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

    def _rest_of_broken(self, scan: Scan) -> Steps[None]:
        """What follows up to the close belongs to the arguments of the broken call."""
        if self.close:
            yield from scan.until((self.close,), scan.arguments)
            scan.drop()
        else:
            while (yield from scan.peek()):
                scan.at = len(scan.buffer)
                scan.arguments()
