"""Calls of tools in the answers of `/v1/chat/completions`. Pure."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.router.api.request.custom_tools import custom_input
from loraplex.router.call import TextEvent
from loraplex.router.parts.parts import CallDelta, ToolCall


class CalledFunction(msgspec.Struct, frozen=True):
    """Function of a call in an answer, with its arguments. arguments: JSON text; in a stream the
    next part of it. name: in a stream at first alone.
    """

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustom(msgspec.Struct, frozen=True):
    """Custom tool of a call in an answer. input: its text; in a stream empty at first, then whole.
    name: in a stream at first alone.
    """

    input: str
    name: str | UnsetType = UNSET


class AnswerCall(msgspec.Struct, frozen=True):
    """A call of a function, or of a custom tool."""

    id: str
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"


class CallPart(msgspec.Struct, frozen=True):
    """A part of the answer's call number `index`. id, type: of its first."""

    index: int
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET


class CallWriter:
    """Writes calls. custom: names of tools that are custom ones."""

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom
        self._open: dict[int, tuple[int, list[str]]] = {}  # choice -> number, arguments so far

    def whole(self, call: ToolCall) -> AnswerCall:
        if call.name not in self._custom:
            return AnswerCall(call.id, CalledFunction(call.arguments, call.name))
        custom = CalledCustom(custom_input(call.arguments), call.name)
        return AnswerCall(call.id, custom=custom, type="custom")

    def parts(self, event: TextEvent) -> list[CallPart]:
        """Returns the event's parts of calls. A custom tool's input comes when it is whole."""
        parts: list[CallPart] = []
        for delta in event.calls:
            if delta.name is not None:
                parts += self._closed(event.choice)
            if delta.name in self._custom:
                self._open[event.choice] = delta.index, []
                begun = CalledCustom("", delta.name or "")
                parts.append(
                    CallPart(delta.index, custom=begun, id=delta.id or UNSET, type="custom")
                )
            if event.choice in self._open:
                self._open[event.choice][1].append(delta.arguments)
            else:
                parts.append(_of_function(delta))
        return parts if event.finish is None else parts + self._closed(event.choice)

    def _closed(self, choice: int) -> list[CallPart]:
        """Returns the input of the choice's last call, if that was of a custom tool."""
        if choice not in self._open:
            return []
        index, pieces = self._open.pop(choice)
        return [CallPart(index, custom=CalledCustom(custom_input("".join(pieces))))]


def _of_function(delta: CallDelta) -> CallPart:
    if delta.name is None:
        return CallPart(delta.index, CalledFunction(delta.arguments))
    function = CalledFunction(delta.arguments, delta.name)
    return CallPart(delta.index, function, id=delta.id or UNSET, type="function")
