"""Conversations as the API hands them on: what a template has to take."""

from typing import Any

Messages = list[dict[str, Any]]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def calls(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "find_order", "arguments": arguments}
    return [{"type": "function", "id": "call00001", "function": function}]


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "call00001", "name": "find_order"}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


TEXT_ARGUMENTS = '{"number":10442, "by": {"name": "Ines Novák"}, "open": true}'
OBJECT_ARGUMENTS = {"number": 10442, "by": {"name": "Ines Novák"}, "open": True}
CONVERSATIONS: dict[str, Messages] = {
    "no system": [user("Where is my parcel?")],
    "system": [system("Answer in one sentence."), user("Where is my parcel?")],
    "developer": [{"role": "developer", "content": "Be brief."}, user("Where is my parcel?")],
    "several turns": [
        system("Be kind."),
        user("  Hello!  "),
        assistant("Good morning.\n"),
        user("Where is it?"),
        assistant("On its way."),
        user("When?"),
    ],
    "a call beside null": [
        user("Where is order 10442?"),
        assistant(None, tool_calls=calls(TEXT_ARGUMENTS)),
        result('{"state": "sent"}'),
    ],
    "a call beside an empty text": [
        user("Where is order 10442?"),
        assistant("", tool_calls=calls(TEXT_ARGUMENTS)),
        result("sent"),
        assistant("It was sent."),
        user("When?"),
    ],
    "a call beside a text": [
        system("Use tools."),
        user("Where is order 10442?"),
        assistant("I look it up.", tool_calls=calls(OBJECT_ARGUMENTS)),
        result("sent"),
    ],
    "lists of parts": [
        system(parts("Answer in", "one sentence.")),
        user(parts("Where is", "my parcel?")),
        assistant(parts("On its way.")),
        user(parts("Thanks", " a lot", "!")),
    ],
    "reasoning": [
        user("Is 7 prime?"),
        assistant("Yes.", reasoning_content="Only 1 and 7 divide it."),
        user("And 8?"),
        assistant("No.", reasoning_content="2 divides it."),
    ],
    "reasoning before a call": [
        user("Where is order 10442?"),
        assistant(None, reasoning_content="I need the state.", tool_calls=calls(TEXT_ARGUMENTS)),
        result("sent"),
    ],
    "an answer begun": [
        system("Write verse."),
        user("A line on rain, please."),
        assistant("The rain that falls upon "),
    ],
    "an empty system message": [
        system(""),
        user("schöne Grüße 🙂 你好 é <|im_end|>\r\n<b>&\"'\\"),
    ],
}
