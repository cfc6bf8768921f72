"""A call as a JSON object that names its function. Pure."""

import json
from collections.abc import Collection
from enum import Enum

from loraplex.router.parts.scan import Scan, Steps
from loraplex.router.tools.formats.json_text import json_string, json_value, repaired, string_text

NAME_KEYS = "name", "tool_name"
ARGUMENT_KEYS = "arguments", "parameters"


class CallOutcome(Enum):
    """none: nothing was taken for a call. broken: the arguments of the call break off."""

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
            self._scan.flows = True
            self._whole = yield from json_value(self._scan)
            self._scan.arguments()
            self._scan.flows = False
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
