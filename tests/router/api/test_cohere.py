"""Cohere's chats as calls, and their answers as its clients read them."""

import json
from typing import Any

import msgspec
import pytest

from loraplex.router.api.cohere_chat import REFUSED, CohereChatBody, parse
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.known_elsewhere import ELSEWHERE
from loraplex.router.call import GenerationCall, RequestError, TextEvent
from loraplex.router.parts.parts import CallDelta, ToolCall
from loraplex.router.shape.shape import JsonSchema
from tests.router.api.answers import HEAD, PROMPT, events, result

LIMITS = ApiLimits(base_names=("small",))
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def asked(**body: Any) -> Any:
    return parse(json.dumps({"model": "small", "messages": [HI]} | body).encode(), LIMITS)


def call_of(**body: Any) -> GenerationCall:
    found: GenerationCall = asked(**body).call
    return found


def test_a_body_is_a_chat() -> None:
    call = call_of(
        max_tokens=9,
        stop_sequences=["a", "b"],
        temperature=0.3,
        k=3,
        p=0.5,
        seed=7,
        frequency_penalty=0.5,
        logprobs=True,
        safety_mode="OFF",
        citation_options={"mode": "OFF"},
        priority=2,
        stream=True,
    )
    assert (call.api, call.max_tokens, call.stop, call.seed) == ("chat", 9, ("a", "b"), 7)
    sampling = call.sampling
    assert (sampling.top_k, sampling.top_p, sampling.logprobs) == (3, 0.5, 0)
    assert call.template.variables == {"safety_mode": "OFF"}
    assert (call.stream, call.priority) == (True, 2)


def test_what_asks_for_nothing_elsewhere() -> None:
    """Also in values that a chat's own field of that name does not take."""
    plain = call_of()
    read = CohereChatBody.__struct_fields__
    for name, field in (ELSEWHERE | REFUSED).items():
        for value in field.neutral if name not in read else ():
            assert call_of(**{name: value}) == plain, (name, value)


@pytest.mark.parametrize(
    ("choice", "mode"), [("REQUIRED", "required"), (None, "auto"), ("NONE", None)]
)
def test_tools(choice: str | None, mode: str | None) -> None:
    tools = call_of(tools=[TOOL], tool_choice=choice).tools
    assert (None if tools is None else tools.mode) == mode


@pytest.mark.parametrize("name", ["json_schema", "schema"])
def test_forms(name: str) -> None:
    schema = {"type": "object", "properties": {}}
    shape = call_of(response_format={"type": "json_object", name: schema}).shape
    assert isinstance(shape, JsonSchema)
    assert shape.schema == schema


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"content": [{"type": "text", "text": "a"}]},
        ),
        (
            {"role": "assistant", "tool_plan": "I ask.", "tool_calls": [CALL], "citations": []},
            {"content": None, "reasoning_content": "I ask.", "tool_calls": [CALL]},
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
            },
            {"content": [{"type": "text", "text": "a"}], "reasoning_content": "hm"},
        ),
        (
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [
                    {"type": "document", "document": {"data": "x"}},
                    {"type": "document", "document": {"id": "1", "data": {"a": 1}}},
                ],
            },
            {
                "content": [{"type": "text", "text": "x"}, {"type": "text", "text": '{"a":1}'}],
                "tool_call_id": "c1",
            },
        ),
    ],
)
def test_messages(message: dict[str, Any], rendered: dict[str, Any]) -> None:
    found = (call_of(messages=[HI, message]).messages or [])[1]
    assert found == {"role": message["role"], **rendered}


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"documents": ["a"]}, "documents", "into the messages"),
        ({"citation_options": {"mode": "FAST"}}, "citation_options", "no citations"),
        ({"strict_tools": True}, "strict_tools", "say `strict`"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences", "at most"),
        ({"p": 2}, "p", "expected"),
        ({"messages": []}, "messages", "expected"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "expected a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "expected `image_url`",
        ),
        ({"surprise": 1}, "surprise", "Unrecognized"),
    ],
)
def test_refused_by_name(body: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        call_of(**body)
    assert refused.value.param == param


def whole(found: Any) -> Any:
    return msgspec.to_builtins(asked().formatter(HEAD).whole([found], [PROMPT]))


def test_an_answer() -> None:
    told = whole(result())
    tokens = {"input_tokens": 2, "output_tokens": 4}
    assert (told["id"], told["finish_reason"]) == ("req1", "COMPLETE")
    assert told["message"] == {"role": "assistant", "content": [{"type": "text", "text": "Helü"}]}
    assert told["usage"] == {"billed_units": tokens, "tokens": tokens, "cached_tokens": 1}
    assert told["logprobs"][0] == {"text": "Hel", "token_ids": [11], "logprobs": [-0.25]}
    assert whole(result(finish="length"))["finish_reason"] == "MAX_TOKENS"
    calls = msgspec.structs.replace(
        result(), text="", calls=(ToolCall("c1", "f", "{}"),), reasoning="I ask."
    )
    called = whole(calls)
    assert called["finish_reason"] == "TOOL_CALL"
    plan = {"tool_calls": [CALL], "tool_plan": "I ask."}
    assert called["message"] == {"role": "assistant", **plan}


def test_events_of_a_text() -> None:
    formatter = asked(stream=True, logprobs=True).formatter(HEAD)
    stream = formatter.prompt(PROMPT) + b"".join(map(formatter.chunk, events())) + formatter.end()
    *told, done = _told(stream)
    assert done == "[DONE]"
    kinds = [one["type"] for one in told]
    assert kinds == [
        *("message-start", "content-start", "content-delta", "content-delta"),
        *("content-end", "message-end"),
    ]
    assert "".join(one["delta"]["message"]["content"]["text"] for one in told[1:4]) == "Helü"
    assert told[2]["logprobs"] == {"text": "Hel", "token_ids": [11], "logprobs": [-0.25]}
    assert told[-1]["delta"]["finish_reason"] == "COMPLETE"
    assert told[-1]["delta"]["usage"]["tokens"] == {"input_tokens": 2, "output_tokens": 4}


def test_events_of_a_plan_and_calls() -> None:
    formatter = asked(stream=True, tools=[TOOL]).formatter(HEAD)
    pieces = [
        TextEvent(0, 0, "", (), reasoning="I ask."),
        TextEvent(0, 0, "", (), calls=(CallDelta(0, "f", "", "c1"),)),
        TextEvent(0, 0, "", (), calls=(CallDelta(0, None, "{}"),)),
        TextEvent(0, 0, "", (), "eos", calls=(CallDelta(1, "f", "{}", "c2"),)),
    ]
    stream = formatter.prompt(PROMPT) + b"".join(map(formatter.chunk, pieces)) + formatter.end()
    told = _told(stream)[:-1]
    assert [(one["type"], one.get("index")) for one in told[1:]] == [
        ("tool-plan-delta", None),
        ("tool-call-start", 0),
        ("tool-call-delta", 0),
        ("tool-call-end", 0),
        ("tool-call-start", 1),
        ("tool-call-delta", 1),
        ("tool-call-end", 1),
        ("message-end", None),
    ]
    assert told[-1]["delta"]["finish_reason"] == "TOOL_CALL"


def test_an_error_ends_a_stream() -> None:
    told = _told(asked(stream=True).formatter(HEAD).error(RequestError("internal", "oh")))
    assert told[0]["delta"] == {"finish_reason": "ERROR", "error": "oh"}


def _told(stream: bytes) -> list[Any]:
    """The payload of each event, whose name is its type."""
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, _, data = block.rpartition("data: ")
        payload: Any = data if data == "[DONE]" else json.loads(data)
        assert not name or name == f"event: {payload['type']}\n"
        found.append(payload)
    return found
