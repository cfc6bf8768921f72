"""Bodies and answers of `/v1/responses`, read by the published SDK's own types."""

import json
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from loraplex.router.api.request.formatter import ApiLimits, ApiRequest, Formatter
from loraplex.router.api.responses import request as responses
from loraplex.router.call import ChoiceResult, FinishReason, RequestError, TextEvent, TextToken
from loraplex.router.parts.parts import CallDelta, ToolCall
from loraplex.router.shape.shape import AnyJson, JsonSchema, Shape
from loraplex.router.tools.tools import Tool, Tools
from tests.router.api.answers import HEAD, PROMPT, TOKENS

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
EASY = {"role": "user", "content": "Say"}


def parse(**fields: Any) -> ApiRequest:
    body = {"model": "json", "input": "Say"} | fields
    return responses.parse(json.dumps(body).encode(), ApiLimits(max_messages=8))


def formatter(**fields: Any) -> Formatter:
    return parse(**fields).formatter(HEAD)


def result(text: str, finish: FinishReason = "eos", **parts: Any) -> ChoiceResult:
    return ChoiceResult(0, 0, text, (), finish, 4, **parts)


def event(text: str = "", finish: FinishReason | None = None, **parts: Any) -> TextEvent:
    return TextEvent(0, 0, text, (), finish, 1, **parts)


def read(stream: bytes) -> list[Any]:
    """The stream's events, validated; each is named as its data is, and they are numbered."""
    found = list[Any]()
    for block in stream.split(b"\n\n")[:-1]:
        name, _, data = block.partition(b"\n")
        plain = json.loads(data.removeprefix(b"data: "))
        assert name.decode() == f"event: {plain['type']}"
        assert plain["sequence_number"] == len(found)
        assert "error" not in plain
        found.append(EVENT.validate_python(plain))
    return found


def read_whole(whole: ChoiceResult) -> Any:
    return Response.model_validate_json(formatter().whole([whole], [PROMPT]))


def stream(parts: list[TextEvent], **fields: Any) -> list[Any]:
    form = formatter(stream=True, **fields)
    return read(form.prompt(PROMPT) + b"".join(map(form.chunk, parts)) + form.end())


def called(index: int, *pieces: str) -> tuple[CallDelta, ...]:
    first, *rest = pieces
    more = [CallDelta(index, None, piece) for piece in rest]
    return (CallDelta(index, f"f{index}", first, f"call_{index}"), *more)


REASONED = [
    event(reasoning="\n"),
    event(reasoning="Let me "),
    event(reasoning="see"),
    event("\n\n"),
    event("Well, "),
    event("then:"),
    event(calls=called(0, "", '{"a"', ": 1}")),
    event("\n"),
    event(calls=called(1, "{}")),
    event(finish="eos"),
]
WHOLE = result(
    "\n\nWell, then:",
    reasoning="\nLet me see",
    calls=(ToolCall("call_0", "f0", '{"a": 1}'), ToolCall("call_1", "f1", "{}")),
)


def test_whole_answer() -> None:
    form = formatter(instructions="Be kind", metadata={"a": "b"}, max_output_tokens=9, user="me")
    answer = Response.model_validate_json(form.whole([result("Hi")], [PROMPT]))
    assert (answer.id, answer.object, answer.status) == ("resp_req1", "response", "completed")
    assert (answer.created_at, answer.model) == (HEAD.created, "org/small")
    assert (answer.instructions, answer.metadata) == ("Be kind", {"a": "b"})
    assert (answer.max_output_tokens, answer.user) == (9, "me")
    assert (answer.output_text, answer.error, answer.incomplete_details) == ("Hi", None, None)
    assert answer.model_extra == {"store": False}
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 4)
    assert (answer.usage.total_tokens, answer.usage.input_tokens_details.cached_tokens) == (6, 1)
    message: Any
    [message] = answer.output
    assert (message.type, message.id, message.status) == ("message", "msg_req1", "completed")


def test_answer_that_is_cut() -> None:
    answer = read_whole(result("Hi", "length"))
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("whole", "kinds"),
    [
        (result(""), ["message"]),
        (result(" "), ["message"]),
        (result("Hi", reasoning="\n\n"), ["message"]),
        (result("", "length", reasoning="Hm"), ["reasoning"]),
        (result("\n", calls=WHOLE.calls), ["function_call"] * 2),
        (WHOLE, ["reasoning", "message", "function_call", "function_call"]),
    ],
)
def test_items_of_an_answer(whole: ChoiceResult, kinds: list[str]) -> None:
    answer = read_whole(whole)
    assert [item.type for item in answer.output] == kinds
    assert len({item.id for item in answer.output}) == len(kinds)


def test_events_of_a_text() -> None:
    events = stream([event("Hel"), event("lo"), event("", "eos")])
    assert [one.type.removeprefix("response.") for one in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert events[0].response.output == []
    assert events[-1].response.output_text == "Hello"
    assert events[-1].response.usage.output_tokens == 3
    assert {one.item_id for one in events[3:8]} == {"msg_req1"}


def test_a_stream_is_the_whole_answer() -> None:
    events = stream(REASONED)
    whole = read_whole(WHOLE)
    assert events[-1].response.output == whole.output
    done = [one for one in events if one.type == "response.output_item.done"]
    assert [one.item for one in done] == whole.output
    assert [one.output_index for one in done] == [0, 1, 2, 3]
    kinds = ("reasoning_text", "output_text", "function_call_arguments")
    for kind, joined in zip(kinds, ("\nLet me see", "\n\nWell, then:", '{"a": 1}{}'), strict=True):
        deltas = [one.delta for one in events if one.type == f"response.{kind}.delta"]
        assert "".join(deltas) == joined


@pytest.mark.parametrize(
    "parts",
    [
        [event(finish="eos")],
        [event(" "), event("\n", "eos")],
        [event(reasoning="\n"), event("Hi"), event(finish="length")],
        [event(reasoning="Hm"), event(finish="length")],
        [event(calls=called(0, '{"a'), finish="length")],
        REASONED,
    ],
)
def test_the_sdk_gathers_the_answer(parts: list[TextEvent]) -> None:
    """Its snapshot, made of the events, is what the last event has."""
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=[], text_format=omit)
    events = stream(parts)
    for one in events:
        state.handle_event(one)
    snapshot: Any = state._ResponseStreamState__current_snapshot  # type: ignore[attr-defined]
    last = events[-1].response
    assert [item.type for item in snapshot.output] == [item.type for item in last.output]
    assert snapshot.output_text == last.output_text
    calls = [item.arguments for item in snapshot.output if item.type == "function_call"]
    assert calls == [item.arguments for item in last.output if item.type == "function_call"]


def test_logprobs_are_the_texts() -> None:
    """Those of reasoning, calls and ends are left out; a stream has them beside its pieces."""
    asked = {"include": [LOGPROBS], "top_logprobs": 2}
    assert parse(**asked).call.sampling.logprobs == 2
    assert parse(include=[LOGPROBS]).call.sampling.logprobs == 0
    assert parse().call.sampling.logprobs is None
    thought = [TextToken(5, word, word, -3.0, False) for word in ("<think>", "Hm", "</think>")]
    marker = TextToken(6, "<tool_call>", "<tool_call>", -4.0, False)
    *told, end = TOKENS
    kwargs: Any = {"reasoning": "Hm", "calls": WHOLE.calls[:1], "reasoning_tokens": 3}
    whole = ChoiceResult(0, 0, "Helü", (*thought, *told, marker, end), "eos", 7, **kwargs)
    answer = Response.model_validate_json(formatter(**asked).whole([whole], [PROMPT]))
    text: Any = next(item for item in answer.output if item.type == "message")
    found = text.content[0].logprobs
    assert [one.logprob for one in found] == [-0.25, -0.5, -0.75]
    assert [one.token for one in found[0].top_logprobs] == ["Hel", "Bye"]
    assert [one.bytes for one in found] == [[72, 101, 108], [0xC3], [0xBC]]
    assert answer.top_logprobs == 2
    parts = [TextEvent(0, 0, "", tuple(thought), reasoning="Hm", num_reasoning=3)]
    parts += [TextEvent(0, 0, token.text, (token,)) for token in told]
    parts += [TextEvent(0, 0, "", (marker,), calls=called(0, '{"a": 1}'), finish="eos")]
    events = stream(parts, **asked)
    deltas = [one for one in events if one.type == "response.output_text.delta"]
    assert [len(one.logprobs) for one in deltas] == [1, 2]
    [done] = [one for one in events if one.type == "response.output_text.done"]
    assert len(done.logprobs) == 3
    last: Any = next(item for item in events[-1].response.output if item.type == "message")
    assert last == text


def test_failure_within_a_stream() -> None:
    form = formatter(stream=True)
    begun = form.prompt(PROMPT) + form.chunk(event("Hel"))
    with pytest.raises(RequestError, match="broke off") as broken:
        form.chunk(event("", "error"))
    events = read(begun + form.error(broken.value))
    failed = events[-1]
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error.message == broken.value.message
    assert failed.response.output_text == "Hel"


def test_call() -> None:
    call = parse(
        instructions="Be kind", max_output_tokens=9, temperature=0.5, top_p=0.25, stream=True
    ).call
    assert call.messages == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Say"},
    ]
    assert (call.max_tokens, call.stream, call.api) == (9, True, "responses")
    assert (call.sampling.temperature, call.sampling.top_p) == (0.5, 0.25)


TOOL = {"type": "function", "name": "f", "description": "F", "parameters": {}, "strict": True}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "f"}],
}
F = Tool("f", "F", {}, True, "tools[0].parameters")


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({}, Tools((F,))),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            Tools((F,), "required", (), False, False),
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            Tools((F,), "required", ("f",), True, False),
        ),
        ({"tool_choice": ALLOWED}, Tools((F,), "required", ("f",))),
        ({"tool_choice": "none"}, None),
    ],
)
def test_tools(fields: dict[str, Any], tools: Tools | None) -> None:
    """They are the call's, and the answer repeats them."""
    asked = parse(tools=[TOOL], **fields)
    assert asked.call.tools == tools
    assert (asked.call.template.tools is None) == (tools is None)
    answer = json.loads(asked.formatter(HEAD).whole([result("Hi")], [PROMPT]))
    assert answer["tools"] == [TOOL]
    assert answer["tool_choice"] == fields.get("tool_choice", "auto")


def test_templates_get_tools_as_they_came() -> None:
    """Tools of a namespace have its name and description; what is no function is made one."""
    further = {"returns": {"x": [1]}, "parameters": None, "name": "g", "type": "function"}
    within: dict[str, Any] = {"name": "h", "type": "function", "strict": None, "parameters": {}}
    tools = [TOOL, further, space("ns", within, description="N")]
    found = parse(tools=tools).call.template.tools
    expected = [
        {"name": "f", "description": "F", "parameters": {}, "strict": True},
        {"returns": {"x": [1]}, "parameters": None, "name": "g"},
        {"name": "h", "strict": None, "parameters": {}, "description": "N"},
    ]
    shown = [{"type": "function", "function": function} for function in expected]
    assert json.dumps(found) == json.dumps(shown)


PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "P",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
DATE = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|x"}}
SHELL = {"type": "local_shell"}


def test_tools_of_codex() -> None:
    """Custom tools are functions of a text; the shell's calls are held to their form."""
    call = parse(tools=[TOOL, PATCH, SHELL], client_metadata={"a": "b"}).call
    assert call.tools is not None
    assert [tool.name for tool in call.tools.offered] == ["f", "patch", "local_shell"]
    assert [tool.strict for tool in call.tools.offered] == [True, False, True]
    text = (call.tools.offered[1].parameters or {})["properties"]["input"]
    assert text["description"].endswith('start: "x"')
    assert call.unbound == ("tools[1].format",)
    assert not parse(tools=[PATCH], tool_choice="none").call.unbound
    held = parse(tools=[DATE], tool_choice={"type": "custom", "name": "patch"}).call
    assert held.tools is not None
    assert (held.tools.named, held.unbound) == (True, ())
    tool = held.tools.offered[0]
    assert tool.strict
    assert (tool.parameters or {})["properties"]["input"]["pattern"] == "^(?:[0-9]+|x)$"
    plain = parse(tools=[{"type": "custom", "name": "say"}]).call
    assert plain.tools is not None
    assert not plain.tools.is_held
    repeated = json.loads(
        parse(tools=[PATCH, SHELL]).formatter(HEAD).whole([result("Hi")], [PROMPT])
    )
    assert repeated["tools"] == [PATCH, SHELL]


TYPED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("patch", '{"input": "*** Begin\\n"}', {"input": "*** Begin\n"}),
    ("patch", '{"input": "*** Be', {"input": '{"input": "*** Be'}),
    ("patch", '{"text": 1}', {"input": '{"text": 1}'}),
    (
        "local_shell",
        '{"command": ["ls", "-l"], "timeout_ms": 5}',
        {"action": {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 5}},
    ),
    ("local_shell", '{"command": ["l', {"action": {"type": "exec", "command": []}}),
)


@pytest.mark.parametrize(("name", "arguments", "said"), TYPED)
def test_calls_of_codex(name: str, arguments: str, said: dict[str, Any]) -> None:
    """Whole and streamed, as the SDK's types have them."""
    tools = [PATCH, SHELL]
    found = result("", calls=(ToolCall("call_1", name, arguments),))
    whole = Response.model_validate_json(
        parse(tools=tools).formatter(HEAD).whole([found], [PROMPT])
    )
    [item] = whole.output
    plain: Any = item.to_dict()
    assert plain["type"] == ("custom_tool_call" if name == "patch" else "local_shell_call")
    assert plain["call_id"] == "call_1"
    shown = plain.get("action", plain)
    wanted: Any = said.get("action", said)
    assert wanted.items() <= shown.items()
    pieces = [arguments[:5], arguments[5:]]
    deltas = (CallDelta(0, name, pieces[0], "call_1"), CallDelta(0, None, pieces[1]))
    events = stream([event(calls=deltas, finish="eos")], tools=tools)
    assert events[-1].response.output == whole.output
    texts = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
    assert "".join(texts) == said.get("input", "")
    assert not any("function_call_arguments" in one.type for one in events)


def test_what_codex_sends_back() -> None:
    action: Any = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None, "user": None}
    items = [
        EASY,
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a"b', "id": "x"},
        {"type": "local_shell_call", "id": "c2", "status": "completed", "action": action},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call_output", "id": "c2", "output": '{"output": ""}'},
    ]
    asked, called, *results = parse(input=items).call.messages or []
    assert asked == EASY
    functions = [call["function"] for call in called["tool_calls"]]
    assert [function["name"] for function in functions] == ["patch", "local_shell"]
    arguments = [json.loads(function["arguments"]) for function in functions]
    assert arguments == [{"input": 'a"b'}, {"command": ["ls"]}]
    assert [call["id"] for call in called["tool_calls"]] == ["c1", "c2"]
    assert [(one["tool_call_id"], one["content"]) for one in results] == [
        ("c1", "done"),
        ("c2", '{"output": ""}'),
    ]


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **more}


def space(name: str, *tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [*tools], **more}


@pytest.mark.parametrize(
    ("tools", "shown", "called", "own"),
    [
        (
            [space("mcp__crm", function("find"), function("note"), description="Customers")],
            ["find", "note"],
            "note",
            ("mcp__crm", "note"),
        ),
        (
            [function("now"), space("mcp__a", function("read")), space("mcp__b", function("read"))],
            ["now", "mcp__a__read", "mcp__b__read"],
            "mcp__b__read",
            ("mcp__b", "read"),
        ),
        (
            [
                space("files", function("read"), {"type": "custom", "name": "edit"}),
                function("read"),
            ],
            ["files__read", "edit", "read"],
            "edit",
            ("files", "edit"),
        ),
        (
            [space("files", function("read")), function("now")],
            ["read", "now"],
            "now",
            (None, "now"),
        ),
    ],
)
def test_tools_of_namespaces(
    tools: list[Any], shown: list[str], called: str, own: tuple[str | None, str]
) -> None:
    """The model reads names that differ; a call comes and goes as the caller has it."""
    asked = parse(tools=tools)
    assert asked.call.tools is not None
    assert [tool.name for tool in asked.call.tools.offered] == shown
    found = result("", calls=(ToolCall("c1", called, '{"input": "x"}'),))
    whole = Response.model_validate_json(asked.formatter(HEAD).whole([found], [PROMPT]))
    [item] = whole.output
    plain: Any = item.to_dict()
    assert (plain.get("namespace"), plain["name"]) == own
    assert [tool.to_dict()["name"] for tool in whole.tools] == [tool["name"] for tool in tools]
    deltas = (CallDelta(0, called, '{"input": "x"}', "c1"),)
    events = stream([event(calls=deltas, finish="eos")], tools=tools)
    assert events[-1].response.output == whole.output
    sent = parse(tools=tools, input=[EASY, plain]).call.messages or []
    assert sent[-1]["tool_calls"][0]["function"]["name"] == called


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([space("s")], "tools[0].tools"),
        ([function("f", tools=[function("g")])], "tools[0].tools"),
        ([{"type": "namespace", "tools": [function("f")]}], "tools[0].name"),
        ([space("s", function("f"), {"type": "web_search"})], "tools[0].tools[1].type"),
        ([space("s", space("t", function("f")))], "tools[0].tools[0].type"),
        ([space("s", function("f"), function("f"))], "tools[0].tools[1].name"),
    ],
)
def test_refused_namespaces(tools: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(tools=tools)
    assert caught.value.param == param


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("text", "shape", "repeated"),
    [
        ({}, None, {"type": "text"}),
        ({"format": {"type": "text"}}, None, {"type": "text"}),
        ({"format": {"type": "json_object"}}, AnyJson("text.format"), {"type": "json_object"}),
        ({"format": NAMED}, JsonSchema(SCHEMA, "text.format.schema"), NAMED),
        ({"format": NAMED | {"schema": False}}, JsonSchema(False, "text.format.schema"), None),
    ],
)
def test_form_of_the_text(text: Any, shape: Shape | None, repeated: Any) -> None:
    asked = parse(text=text)
    assert asked.call.shape == shape
    answer = json.loads(asked.formatter(HEAD).whole([result("{}")], [PROMPT]))
    assert answer["text"] == {"format": repeated or NAMED | {"schema": False}}


def test_reasoning_fields() -> None:
    asked = parse(reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"a": 1})
    assert parse(text={"verbosity": "low"}).call.template.verbosity == "low"
    assert (asked.call.template.effort, asked.call.template.variables) == ("low", {"a": 1})
    answer = json.loads(asked.formatter(HEAD).whole([result("Hi")], [PROMPT]))
    assert answer["reasoning"] == {"effort": "low", "summary": None}


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
PLAIN_CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "21"}
SPOKEN = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
HM = {"type": "reasoning_text", "text": "Hm"}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant"} | fields


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([EASY], [EASY]),
        ([EASY | {"content": [{"type": "input_text", "text": "Say"}]}], [EASY]),
        ([SPOKEN, SPOKEN], [said(content="Hi"), said(content="Hi")]),
        ([CALL, CALL], [said(content=None, tool_calls=[PLAIN_CALL, PLAIN_CALL])]),
        (
            [THOUGHT | {"content": [HM]}, SPOKEN, CALL, OUTPUT],
            [
                said(content="Hi", reasoning_content="Hm", tool_calls=[PLAIN_CALL]),
                {"role": "tool", "content": "21", "tool_call_id": "c1"},
            ],
        ),
        (
            [CALL, THOUGHT | {"summary": [{"type": "summary_text", "text": "Hm"}]}],
            [
                said(content=None, tool_calls=[PLAIN_CALL]),
                said(content="", reasoning_content="Hm"),
            ],
        ),
        ([EASY, THOUGHT | {"encrypted_content": "x"}], [EASY]),
        (
            [OUTPUT | {"output": [{"type": "input_text", "text": "21"}]}],
            [{"role": "tool", "content": "21", "tool_call_id": "c1"}],
        ),
        ([said(content=[{"type": "refusal", "refusal": "No"}])], [said(content="No")]),
    ],
)
def test_items_become_messages(items: list[Any], messages: list[Any]) -> None:
    assert parse(input=items).call.messages == messages


LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [EASY] * 9}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [EASY, {"role": "tool", "content": "x"}]}, "input[1].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [EASY | {"content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {
                "input": [
                    EASY | {"content": [{"type": "input_image", "image_url": "u", "file_id": "x"}]}
                ]
            },
            "input[0].content[0].file_id",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [CALL | {"name": None}]}, "input[0].name"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [OUTPUT | {"call_id": None}]}, "input[0].call_id"),
        ({"input": [OUTPUT | {"output": None}]}, "input[0].output"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["everything"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": 99}, "top_logprobs"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"inptu": "x"}, "inptu"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [SHELL, SHELL]}, "tools[1].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"format": {"type": "text"}}]}, "tools[0].format"),
        ({"tools": [PATCH | {"format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "local_shell_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [TOOL | {"name": None}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text", "tone": "kind"}}}, "text.format.tone"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"form": {}}}, "text.form"),
        ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {}}, "guided_json"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "vast"}}, "reasoning.summary"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert refused.value.cause in ("invalid", "unsupported", "unknown_parameter")


def test_what_asks_for_nothing_passes() -> None:
    """As openai-agents sends it, and with all that may be null."""
    parse(include=[], tools=[], store=False, truncation="disabled", background=False)
    parse(**dict.fromkeys(("store", "include", "tools", "text", "reasoning", "conversation")))
    parse(store=True, include=["reasoning.encrypted_content", "code_interpreter_call.outputs"])
    parse(text={"format": {"type": "text"}}, parallel_tool_calls=False, service_tier="auto")
    parse(truncation="auto", max_tool_calls=2, reasoning={"summary": "detailed"}, plugins=[])
    parse(reasoning={"generate_summary": "concise"})


def test_items_may_be_empty() -> None:
    """Outputs of answers that broke off, and of tools that have nothing to say, are taken."""
    items = [{"role": "user", "content": "a"}, CALL, OUTPUT | {"output": []}]
    items.append({"type": "message", "role": "assistant", "content": []})
    *_, result, answer = parse(input=items).call.messages or []
    assert (result["role"], result["content"]) == ("tool", "")
    assert answer == {"role": "assistant", "content": ""}
