"""Answers of `/v1/messages`, whole and streamed: a stream says what the whole answer has."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.api.messages.blocks import (
    MessageEvent,
    MessageFormatter,
    MessageObject,
    MessageOptions,
)
from loraplex.router.call import ChoiceResult, FinishReason, RequestError, TextEvent
from loraplex.router.parts.parts import CallDelta, ToolCall
from tests.router.api.answers import HEAD, PROMPT

WEATHER = ToolCall("call_0", "weather", '{"place": "Köln"}')


def result(text: str, finish: FinishReason = "eos", **parts: Any) -> ChoiceResult:
    return ChoiceResult(0, 0, text, (), finish, 4, **parts)


def event(text: str = "", finish: FinishReason | None = None, **parts: Any) -> TextEvent:
    return TextEvent(0, 0, text, (), finish, 1, **parts)


def whole(found: ChoiceResult) -> Any:
    data = MessageFormatter(HEAD, MessageOptions()).whole([found], [PROMPT])
    msgspec.json.decode(data, type=MessageObject)
    return json.loads(data)


def read(stream: bytes) -> list[Any]:
    """The stream's events, validated; each is named as its data is."""
    found = []
    for block in stream.split(b"\n\n")[:-1]:
        name, _, data = block.partition(b"\n")
        data = data.removeprefix(b"data: ")
        msgspec.json.decode(data, type=MessageEvent)
        found.append(json.loads(data))
        assert name.decode() == f"event: {found[-1]['type']}"
    return found


def stream(parts: list[TextEvent]) -> list[Any]:
    form = MessageFormatter(HEAD, MessageOptions())
    return read(form.prompt(PROMPT) + b"".join(map(form.chunk, parts)) + form.end())


def gathered(events: list[Any]) -> Any:
    """The message that a client makes of the events, blocks one after another."""
    first, ping, *rest, last = events
    assert (first["type"], ping["type"], last["type"]) == ("message_start", "ping", "message_stop")
    message, inputs, is_open = first["message"], list[str](), False
    for one in rest:
        kind, blocks = one["type"], message["content"]
        if kind == "message_delta":
            message |= one["delta"] | {"usage": one["usage"]}
            assert one is rest[-1]
            continue
        assert is_open == (kind != "content_block_start")
        if kind == "content_block_start":
            blocks.append(one["content_block"])
            inputs.append("")
        elif kind == "content_block_delta":
            piece = one["delta"]
            if piece["type"] == "input_json_delta":
                inputs[-1] += piece["partial_json"]
            else:
                name = piece["type"].removesuffix("_delta")
                assert blocks[-1]["type"] == name
                blocks[-1][name] += piece[name]
        is_open = kind != "content_block_stop"
        assert one["index"] == len(blocks) - 1
    for block, spelled in zip(message["content"], inputs, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(spelled)
    return message


def test_whole_answer() -> None:
    assert whole(result("Hi")) == {
        "type": "message",
        "id": "msg_req1",
        "role": "assistant",
        "model": "org/small",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_read_input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "output_tokens": 4,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("found", "reason", "kinds"),
    [
        (result("Hi", "length"), "max_tokens", ["text"]),
        (result("Hi", "stop", matched="END"), "stop_sequence", ["text"]),
        (result("Hi", "stop"), "end_turn", ["text"]),
        (result("", calls=(WEATHER,)), "tool_use", ["tool_use"]),
        (result("\n", calls=(WEATHER,)), "tool_use", ["tool_use"]),
        (result("", "length", calls=(WEATHER,)), "max_tokens", ["tool_use"]),
        (
            result("a", reasoning="Hm", calls=(WEATHER,)),
            "tool_use",
            ["thinking", "text", "tool_use"],
        ),
        (result("a", reasoning="\n"), "end_turn", ["text"]),
        (result("", "length", reasoning="Hm"), "max_tokens", ["thinking"]),
        (result(""), "end_turn", []),
        (result(" "), "end_turn", ["text"]),
    ],
)
def test_how_answers_end(found: ChoiceResult, reason: str, kinds: list[str]) -> None:
    answer = whole(found)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, found.matched)
    assert [block["type"] for block in answer["content"]] == kinds


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (WEATHER.arguments, {"place": "Köln"}),
        ('{"place": "K', {}),
        ("", {}),
        ("[1]", {}),
        ('{"a": "\\ud800"}', {}),
        (f'{{"a": {2**70}}}', {"a": 2**70}),
    ],
)
def test_input_of_a_call(arguments: str, given: Any) -> None:
    [block] = whole(result("", calls=(ToolCall("c", "f", arguments),)))["content"]
    assert block == {"type": "tool_use", "id": "c", "name": "f", "input": given}


def test_events_of_a_text() -> None:
    events = stream([event("Hel"), event("lo"), event("", "stop", matched="END")])
    assert [one["type"] for one in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert events[-2]["usage"]["output_tokens"] == 3


BLANK_OR_TEXT = st.text("a \n", max_size=3)


@given(
    st.lists(BLANK_OR_TEXT, max_size=4),
    st.lists(BLANK_OR_TEXT, max_size=4),
    st.lists(st.lists(st.text(max_size=3), max_size=3), max_size=3),
)
def test_a_stream_is_the_whole_answer(
    reasoning: list[str], text: list[str], calls: list[list[str]]
) -> None:
    """Reasoning, text and calls, each in pieces of any size."""
    parts = [event(reasoning=piece) for piece in reasoning] + [event(piece) for piece in text]
    made = []
    for i, strings in enumerate(calls):
        pieces = ["{", *(f'"{j}":{json.dumps(s)},' for j, s in enumerate(strings)), '"z":1}']
        made.append(ToolCall(f"c{i}", f"f{i}", "".join(pieces)))
        parts.append(event(calls=(CallDelta(i, f"f{i}", "", f"c{i}"),)))
        parts += [event(calls=(CallDelta(i, None, piece),)) for piece in pieces]
    parts.append(event(finish="eos"))
    found = msgspec.structs.replace(
        result("".join(text), reasoning="".join(reasoning), calls=tuple(made)),
        generated_tokens=len(parts),
    )
    assert gathered(stream(parts)) == whole(found)


def test_reasoning_that_shall_not_be_shown() -> None:
    """It is an empty block, whole and streamed."""
    options = MessageOptions(shows_thinking=False)
    found = result("a", reasoning="Hm")
    answer = json.loads(MessageFormatter(HEAD, options).whole([found], [PROMPT]))
    form = MessageFormatter(HEAD, options)
    parts = [event(reasoning="H"), event(reasoning="m"), event("a"), event(finish="eos")]
    streamed = form.prompt(PROMPT) + b"".join(map(form.chunk, parts)) + form.end()
    for message in (answer, gathered(read(streamed))):
        thought = {"type": "thinking", "thinking": "", "signature": ""}
        assert message["content"] == [thought, {"type": "text", "text": "a"}]


def test_failure_within_a_stream() -> None:
    form = MessageFormatter(HEAD, MessageOptions("mine"))
    begun = read(form.prompt(PROMPT) + form.chunk(event("Hel")))
    assert begun[0]["message"]["id"] == "msg_mine"
    with pytest.raises(RequestError, match="broke off") as broken:
        form.chunk(event("", "error"))
    name, _, data = form.error(broken.value).partition(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": broken.value.message},
        "request_id": "req1",
    }
