"""Finds out how a chat template reads messages. Pure.

Small conversations are rendered, and their texts are sought in the result.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.chat.conversation import REASONING, Message, MessageForm, NoContent, shaped

# What a template writes of messages and variables; None where it fails.
Render = Callable[[list[Message], dict[str, Any]], str | None]

# Words that no template writes of itself.
_USER, _FIRST, _SECOND, _RESULT = "probeuser", "probefirst", "probesecond", "proberesult"
_CALL, _KEY, _VALUE = "probecall", "probekey", "probevalue"
_PARTS = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]
# A part as Python or JSON spells it: written whole, not read.
_SPELLED_PART = re.compile(r"""['"]text\\*['"]\s*:""")
_NONE = re.compile(r"\b[Nn]one\b|\bnull\b")
_ASKED: Message = {"role": "user", "content": _USER}
_ANSWERED: Message = {"role": "assistant", "content": _RESULT}
# Some templates want ids of nine letters and digits.
_CALLS = [
    {
        "type": "function",
        "id": "probe0000",
        "function": {"name": _CALL, "arguments": {_KEY: _VALUE}},
    }
]
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _CALL,
        "description": "probe",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": []},
    },
}
_OPEN = {"add_generation_prompt": False}
# Without tools, and with one: some write calls only beside them.
_WITH_TOOLS: tuple[dict[str, Any], ...] = ({}, {"tools": [_TOOL]})
# Switches by which templates keep reasoning in the prompt.
_THINKING: dict[str, Any] = {
    **dict.fromkeys(("enable_thinking", "thinking", "keep_past_thinking"), True),
    **dict.fromkeys(("preserve_thinking", "keep_reasoning", "preserve_reasoning"), True),
    **dict.fromkeys(("clear_thinking", "truncate_history_thinking"), False),
    "reasoning_effort": "high",
}


def find_form(render: Render, literals: Collection[str]) -> MessageForm:
    """The form that a template reads. literals: texts that its code compares with or looks up."""
    probe = _Probe(render)
    form = MessageForm()
    for role in ("user", "system", "assistant"):
        form = probe.content_of(role, form)
    form = probe.calls(form)
    form = probe.content_of("tool", form)
    form = probe.developer(form, literals)
    return replace(form, reasoning=probe.reasoning(form, literals))


def reads_system(render: Render, form: MessageForm) -> bool:
    """Whether the template writes what the system says. form: in which it reads messages."""
    return _Probe(render).reads("system", _FIRST, form)


class _Probe:
    """Questions to one template."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def content_of(self, role: str, form: MessageForm) -> MessageForm:
        """Adds how `role` takes content: text, lists of parts, or both."""
        wrapped = replace(form, only_lists=(*form.only_lists, role))
        if self.reads(role, _PARTS, replace(form, lists=(*form.lists, role))):
            form = replace(form, lists=(*form.lists, role))
            wrapped = replace(wrapped, lists=form.lists)
        if self.reads(role, _FIRST, form) or not self.reads(role, _FIRST, wrapped, spelled=True):
            return form
        return wrapped

    def calls(self, form: MessageForm) -> MessageForm:
        """Adds how tool calls are read: the form of arguments, and of null content."""
        for variables, conversation in itertools.product(_WITH_TOOLS, _around_call(None)):
            for candidate in _call_forms(form):
                if self._shows_call(conversation, candidate, variables):
                    return self._empty_text(conversation, candidate, variables)
        return self._without_calls(form)

    def developer(self, form: MessageForm, literals: Collection[str]) -> MessageForm:
        """Adds whether the template knows the role `developer` by its name."""
        if "developer" not in literals:
            return form
        known = self.content_of("developer", replace(form, developer=True))
        return known if self.reads("developer", _FIRST, known) else form

    def reasoning(self, form: MessageForm, literals: Collection[str]) -> str | None:
        """The first name by which the template writes reasoning."""
        names = [name for name in REASONING if name in literals]
        for variables in ({}, _THINKING):
            for name in names:
                if self._writes_reasoning(replace(form, reasoning=name), variables):
                    return name
        return None

    def _writes_reasoning(self, form: MessageForm, variables: dict[str, Any]) -> bool:
        for conversation, closed in _around_reasoning():
            text = self._render(shaped(conversation, form), {**variables, **closed})
            if text is not None and _FIRST in text:
                return True
        return False

    def reads(self, role: str, content: Any, form: MessageForm, *, spelled: bool = False) -> bool:
        """Whether the content's texts are written. spelled: be it with the frames of its parts."""
        texts = [_FIRST, _SECOND] if content is _PARTS else [_FIRST]
        for conversation, variables in itertools.product(_around(role, content), _WITH_TOOLS):
            found = self._render(shaped(conversation, form), variables)
            if found is not None and all(text in found.lower() for text in texts):
                return spelled or _SPELLED_PART.search(found) is None
        return False

    def _shows_call(
        self, conversation: list[Message], form: MessageForm, variables: dict[str, Any]
    ) -> bool:
        """Whether the call is written as a model would write it."""
        text = self._render(shaped(conversation, form), variables)
        if text is None or not all(word in text for word in (_CALL, _KEY, _VALUE)):
            return False
        if any(spelled in text for spelled in (f'\\"{_KEY}', f"'{_KEY}'")):
            return False
        return not self._writes_none(text, conversation, form, variables)

    def _empty_text(
        self, conversation: list[Message], form: MessageForm, variables: dict[str, Any]
    ) -> MessageForm:
        """Adds whether a call with an empty text is written, too."""
        empty = [{**message, "content": message["content"] or ""} for message in conversation]
        return replace(form, empty_text=self._shows_call(empty, form, variables))

    def _without_calls(self, form: MessageForm) -> MessageForm:
        """Finds a form whose null content does not break a template that writes no calls."""
        for conversation in _around_call(None):
            for candidate in _call_forms(form):
                text = self._render(shaped(conversation, candidate), {})
                if text is not None and not self._writes_none(text, conversation, candidate, {}):
                    return candidate
        return form

    def _writes_none(
        self,
        text: str,
        conversation: list[Message],
        form: MessageForm,
        variables: dict[str, Any],
    ) -> bool:
        """Whether null content is written as a word: more often than with a text."""
        full = [{**message, "content": message["content"] or _FIRST} for message in conversation]
        beside_text = self._render(shaped(full, form), variables) or ""
        return len(_NONE.findall(text)) > len(_NONE.findall(beside_text))


def _around(role: str, content: Any) -> Iterator[list[Message]]:
    """Conversations in which `role` says `content`."""
    message: Message = {"role": role, "content": content}
    if role == "user":
        yield [message]
    elif role == "assistant":
        yield [_ASKED, message, _ASKED]
        yield [_ASKED, message]
    elif role == "tool":
        yield from _around_call(content)
    else:
        yield [message, _ASKED]


def _around_call(result: Any) -> Iterator[list[Message]]:
    """Yields conversations with a tool call and null content. result: None = any."""
    call: Message = {"role": "assistant", "content": None, "tool_calls": _CALLS}
    answer: Message = {
        "role": "tool",
        "content": _RESULT if result is None else result,
        "tool_call_id": "probe0000",
        "name": _CALL,
    }
    yield [_ASKED, call, answer]
    yield [_ASKED, call, answer, _ANSWERED, _ASKED]
    if result is None:
        yield [_ASKED, call]


def _around_reasoning() -> Iterator[tuple[list[Message], dict[str, Any]]]:
    """Conversations with reasoning, and how their prompts end."""
    answer: Message = {**_ANSWERED, "reasoning_content": _FIRST}
    call: Message = {**answer, "tool_calls": _CALLS}
    result: Message = {
        "role": "tool",
        "content": _RESULT,
        "tool_call_id": "probe0000",
        "name": _CALL,
    }
    yield [_ASKED, answer], _OPEN
    yield [_ASKED, call, result], {}
    yield [_ASKED, {**call, "content": None}, result], {}
    yield [_ASKED, answer, _ASKED], {}


def _call_forms(form: MessageForm) -> Iterator[MessageForm]:
    """Yields forms in the order of trial, that of the newest transformers first."""
    contents: tuple[NoContent, ...] = ("absent", "null", "empty", "part")
    for arguments in ("object", "text"):
        for content in contents:
            yield replace(form, arguments=arguments, no_content=content)
