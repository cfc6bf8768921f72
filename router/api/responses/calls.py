"""Calls as items of `/v1/responses`: of functions, custom tools and the caller's shell. Pure."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.adapters.common.strict_json import StrictJsonError, decode_object

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallKind = Literal["custom", "local_shell"]
# What models call the shell.
SHELL = "local_shell"


class CallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """arguments: JSON text. namespace: of a function in one."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """input: a text; of a call that broke off, what the model wrote."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ShellAction(msgspec.Struct, frozen=True, tag_field="type", tag="exec"):
    """What to run: empty where the call broke off. env, user: never said."""

    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: None = None
    working_directory: str | None = None


class ShellCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="local_shell_call"):
    id: str
    status: ItemStatus
    call_id: str
    action: ShellAction


AnyCallItem = CallItem | CustomCallItem | ShellCallItem


class Called(msgspec.Struct, frozen=True):
    """A call of an answer. kind: None = of a function. id: of its item; call_id: its own."""

    kind: CallKind | None
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET

    def item(self, status: ItemStatus, arguments: str) -> AnyCallItem:
        """arguments: JSON text, as far as it came."""
        if self.kind == "custom":
            text = _input(arguments)
            return CustomCallItem(self.id, status, self.call_id, self.name, text, self.namespace)
        if self.kind == "local_shell":
            return ShellCallItem(self.id, status, self.call_id, _action(arguments))
        return CallItem(self.id, status, self.call_id, self.name, arguments, self.namespace)


def custom_arguments(text: str) -> str:
    """As a function has it."""
    return msgspec.json.encode({"input": text}).decode()


def shell_arguments(action: Mapping[str, Any]) -> str:
    """As a function has them."""
    said = {name: value for name, value in action.items() if value and name in _SHELL_FIELDS}
    return msgspec.json.encode(said).decode()


_SHELL_FIELDS = ("command", "working_directory", "timeout_ms")


def _input(arguments: str) -> str:
    try:
        found = decode_object(arguments.encode()).get("input")
    except StrictJsonError:
        found = None
    return found if isinstance(found, str) else arguments


def _action(arguments: str) -> ShellAction:
    try:
        plain = decode_object(arguments.encode())
        return msgspec.convert({**plain, "type": "exec"}, ShellAction)
    except (StrictJsonError, msgspec.ValidationError):
        return ShellAction()
