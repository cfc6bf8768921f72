"""Tools for a model whose chat template reads none: a default text, and calls and results as texts.

Calls have the form of Hermes, whatever form the template would write. Pure.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from loraplex.adapters.chat.conversation import Message

_TEXT = """\
# Tools

You may call the functions below. Each line is one of them as JSON: its name, what it does, and \
the schema of its arguments.

{tools}

A call is a JSON object with the function's name and its arguments, between two marks:

<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>

Several calls stand one after another. Their results come between <tool_response> and \
</tool_response>. Where no function helps, answer in words."""
_SYSTEM = ("system", "developer")


def described(
    messages: Collection[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    reads_system: bool,
) -> list[Message]:
    """messages: as `shaped` takes them, without calls and results then. tools: as templates read
    them; None = the text is left out.

    The text ends the system's message, or begins the user's first where the template reads no
    system's, which is put before it.
    """
    plain = _without_calls(messages)
    if not tools:
        return plain
    functions = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    texts = [_TEXT.format(tools="\n".join(functions))]
    if plain and plain[0]["role"] in _SYSTEM:
        first = plain.pop(0)
        texts.insert(0, _text(first["content"]))
        if reads_system:
            return [{**first, "content": _joined(texts)}, *plain]
    if reads_system:
        return [{"role": "system", "content": _joined(texts)}, *plain]
    if plain and plain[0]["role"] == "user":
        first = plain.pop(0)
        return [{**first, "content": _joined([*texts, _text(first["content"])])}, *plain]
    return [{"role": "user", "content": _joined(texts)}, *plain]


def _without_calls(messages: Collection[Mapping[str, Any]]) -> list[Message]:
    """Results that stand together, and what the user says right behind, are one message."""
    plain: list[Message] = []
    in_results = False
    for message in messages:
        role, content = message["role"], _text(message["content"])
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if in_results and role in ("tool", "user"):
            plain[-1]["content"] += f"\n{content}"
        elif role == "tool":
            plain.append({"role": "user", "content": content})
        elif calls := message.get("tool_calls"):
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            said = [content] if content else []
            plain.append({**kept, "content": "\n".join([*said, *map(_call, calls)])})
        else:
            plain.append(dict(message))
        in_results = role == "tool" or (in_results and role == "user")
    return plain


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    written = f'{{"name": {name}, "arguments": {arguments.strip() or "{}"}}}'
    return f"<tool_call>\n{written}\n</tool_call>"


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)
