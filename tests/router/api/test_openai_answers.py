"""OpenAI's answers, read by the published SDK's own types."""

import json
from typing import Any

import msgspec
import pytest
from huggingface_hub import ChatCompletionOutput, ChatCompletionStreamOutput
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from loraplex.router.api.openai import chat as openai_chat
from loraplex.router.api.openai import completions as openai_completions
from loraplex.router.api.request.formatter import ApiLimits, Formatter
from loraplex.router.call import ChoiceResult, PromptInfo, RequestError, TextEvent
from loraplex.router.parts.parts import CallDelta, ToolCall
from tests.router.api.answers import HEAD, PROMPT, TOKENS, events, payloads, result

# Of a message, or a delta, without any.
NO_REASONING = {"reasoning": None, "reasoning_content": None}


def completions(**fields: Any) -> Formatter:
    body = {"model": "json", "prompt": "Say"} | fields
    return openai_completions.parse(json.dumps(body).encode(), ApiLimits()).formatter(HEAD)


def chat(**fields: Any) -> Formatter:
    body = {"model": "json", "messages": [{"role": "user", "content": "Say"}]} | fields
    return openai_chat.parse(json.dumps(body).encode(), ApiLimits()).formatter(HEAD)


def stream(form: Formatter, parts: list[TextEvent]) -> list[Any]:
    return payloads(form.prompt(PROMPT) + b"".join(map(form.chunk, parts)) + form.end())


def strict(kind: Any, value: Any) -> Any:
    """Validated, unlike what the SDK does with answers."""
    return kind.model_validate(value, strict=True)


def test_completion() -> None:
    answer = json.loads(completions().whole([result()], [PROMPT]))
    parsed = strict(Completion, answer)
    assert (parsed.id, parsed.created, parsed.model) == ("cmpl-req1", 1700000000, "org/small")
    assert parsed.choices[0].text == "Helü"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].logprobs is None
    assert parsed.usage.total_tokens == 6
    assert parsed.usage.prompt_tokens_details.cached_tokens == 1
    assert parsed.system_fingerprint == "fp_" + "b" * 10 + "d" * 10


def test_completion_logprobs() -> None:
    answer = json.loads(completions(logprobs=2).whole([result(finish="length")], [PROMPT]))
    choice = strict(Completion, answer).choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens == ["Hel", "�", "�", "</s>"]
    assert choice.logprobs.text_offset == [0, 3, 3, 4]
    assert choice.logprobs.top_logprobs[0] == {"Hel": -0.25, "Bye": -1.5}


def test_echo() -> None:
    answer = json.loads(completions(logprobs=0, echo=True).whole([result()], [PROMPT]))
    choice = answer["choices"][0]
    assert choice["text"] == "SayHelü"
    assert choice["logprobs"]["tokens"][:3] == ["<s>", "Say", "Hel"]
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -2.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][:4] == [0, 0, 3, 6]
    parts = stream(completions(logprobs=0, echo=True, stream=True), events())
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == "SayHelü"
    tokens = [t for part in parts[:-1] for t in part["choices"][0]["logprobs"]["tokens"]]
    offsets = [o for part in parts[:-1] for o in part["choices"][0]["logprobs"]["text_offset"]]
    assert tokens == choice["logprobs"]["tokens"]
    assert offsets == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("streamed", [False, True])
def test_text_after_a_prompt_is_distinguished_from_its_end(streamed: bool) -> None:
    """Whatever its tokens' texts are together."""
    prompt = msgspec.structs.replace(PROMPT, text="  Say")
    formatter = completions(logprobs=0, echo=True, stream=streamed)
    if streamed:
        formatter.prompt(prompt)
        told = json.loads(formatter.chunk(events()[0]).removeprefix(b"data: "))
    else:
        told = json.loads(formatter.whole([result()], [prompt]))
    offsets = told["choices"][0]["logprobs"]["text_offset"]
    assert offsets[0 if streamed else len(prompt.tokens)] == len("  Say")


def test_the_prompt_alone() -> None:
    """`max_tokens` 0 with `echo`: logprobs of the prompt, as evaluation harnesses ask for them."""
    wanted: dict[str, Any] = {"logprobs": 0, "echo": True, "max_tokens": 0}
    nothing = ChoiceResult(0, 0, "", (), "length", 0, None)
    answer = json.loads(completions(**wanted).whole([nothing], [PROMPT]))
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Say", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "Say"]
    assert answer["usage"]["completion_tokens"] == 0
    options = {"include_usage": True}
    end = [TextEvent(0, 0, "", (), "length", 0)]
    *parts, _ = stream(completions(**wanted, stream=True, stream_options=options), end)
    chunks = [part["choices"][0] for part in parts if part["choices"]]
    assert "".join(chunk["text"] for chunk in chunks) == "Say"
    assert [t for chunk in chunks for t in chunk["logprobs"]["tokens"]] == ["<s>", "Say"]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, "length"]
    assert parts[-1]["usage"]["completion_tokens"] == 0


def test_best_of_and_n_of_several_prompts() -> None:
    prompts = [PromptInfo(1, "b", 3), PromptInfo(0, "a", 2)]
    results = [
        msgspec.structs.replace(result(p, c, mean=mean), text=f"{p}.{c}")
        for p, c, mean in [(0, 0, -3), (0, 1, -1), (0, 2, -2), (1, 0, -1), (1, 1, -2), (1, 2, -3)]
    ]
    form = completions(prompt=["a", "b"], n=2, best_of=3)
    answer = json.loads(form.whole(results, prompts))
    assert [c["text"] for c in answer["choices"]] == ["0.1", "0.2", "1.0", "1.1"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 24


def test_completion_stream() -> None:
    parts = stream(completions(stream=True), events())
    assert parts.pop() == "[DONE]"
    chunks = [Completion.model_construct(**part) for part in parts]
    assert "".join(part["choices"][0]["text"] for part in parts) == "Helü"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "stop"]
    assert {chunk.id for chunk in chunks} == {"cmpl-req1"}
    assert all("usage" not in part for part in parts)


@pytest.mark.parametrize("make", [completions, chat])
def test_usage_of_a_stream(make: Any) -> None:
    parts = stream(make(stream=True, stream_options={"include_usage": True}), events())
    assert parts.pop() == "[DONE]"
    last = parts.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens"] == 2
    assert all(part["usage"] is None for part in parts)


@pytest.mark.parametrize("make", [completions, chat])
def test_usage_in_each_chunk(make: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, _ = stream(make(stream=True, stream_options=options), events())
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert 0 < counts[-3] < 4
    assert {part["usage"]["prompt_tokens"] for part in parts} == {2}
    alone = {"continuous_usage_stats": True}
    assert all(
        "usage" not in part for part in stream(make(stream=True, stream_options=alone), [])[:-1]
    )


def test_chat() -> None:
    answer = json.loads(chat(n=2).whole([result(), result(choice=1, finish="length")], [PROMPT]))
    parsed = strict(ChatCompletion, answer)
    assert parsed.id == "chatcmpl-req1"
    assert parsed.choices[0].message.content == "Helü"
    assert [c.finish_reason for c in parsed.choices] == ["stop", "length"]
    assert [c.index for c in parsed.choices] == [0, 1]
    assert parsed.usage.completion_tokens == 8
    assert ChatCompletionOutput.parse_obj_as_instance(answer).choices[0].message.content == "Helü"


def test_chat_logprobs() -> None:
    answer = json.loads(chat(logprobs=True, top_logprobs=2).whole([result()], [PROMPT]))
    content = strict(ChatCompletion, answer).choices[0].logprobs.content
    assert [token.token for token in content] == ["Hel", "�", "�"]
    assert [token.bytes for token in content] == [[72, 101, 108], [0xC3], [0xBC]]
    assert bytes(b for token in content for b in token.bytes).decode() == "Helü"
    assert [top.token for top in content[0].top_logprobs] == ["Hel", "Bye"]
    assert content[1].top_logprobs[0].bytes is None


def test_chat_stream() -> None:
    parts = stream(chat(stream=True), events())
    assert parts.pop() == "[DONE]"
    chunks = [strict(ChatCompletionChunk, part) for part in parts]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Helü"
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]
    assert parts[-1]["choices"][0]["delta"] == NO_REASONING
    assert all("role" not in part["choices"][0]["delta"] for part in parts[1:])
    for part in parts:
        ChatCompletionStreamOutput.parse_obj_as_instance(part)


def test_chat_stream_of_several_choices() -> None:
    form = chat(stream=True, n=2)
    parts = stream(form, [*events(1), *events(0)])[:-1]
    assert [p["choices"][0]["index"] for p in parts] == [0, 1, 1, 1, 1, 0, 0, 0]


def test_chat_stream_logprobs() -> None:
    parts = stream(chat(stream=True, logprobs=True), events())[:-1]
    tokens = [
        token["token"]
        for part in parts
        if part["choices"][0]["logprobs"]
        for token in part["choices"][0]["logprobs"]["content"]
    ]
    assert tokens == ["Hel", "�", "�"]


def test_nothing_to_say_is_no_chunk() -> None:
    event = TextEvent(0, 0, "", TOKENS[1:2], None, 1)
    assert chat(stream=True).chunk(event) == b""
    assert completions(stream=True).chunk(event) == b""


def test_errors_in_a_stream_are_raised_by_the_sdk_from_the_error_key() -> None:
    event = payloads(chat().error(RequestError("unavailable", "the engine was lost")))[0]
    assert event["error"]["message"] == "the engine was lost"
    assert event["error"]["code"] == "unavailable"


@pytest.mark.parametrize("make", [completions, chat])
def test_broken_answers_are_errors(make: Any) -> None:
    with pytest.raises(RequestError):
        make().chunk(events(finish="error")[-1])


@pytest.mark.parametrize("make", [completions, chat])
@pytest.mark.parametrize(
    ("finish", "matched", "reason"),
    [
        ("eos", 2, None),
        ("stop", 40, 40),
        ("stop", "\n\nUser:", "\n\nUser:"),
        ("length", None, None),
    ],
)
def test_what_stopped_an_answer(
    make: Any, finish: Any, matched: int | str | None, reason: int | str | None
) -> None:
    """As vLLM says, to which the model's own end is nothing, and as SGLang does."""
    ended = msgspec.structs.replace(result(finish=finish), matched=matched)
    choice = json.loads(make().whole([ended], [PROMPT]))["choices"][0]
    assert (choice["stop_reason"], choice["matched_stop"]) == (reason, matched)
    parts = events(finish=finish)
    parts[-1] = msgspec.structs.replace(parts[-1], matched=matched)
    *before, last = [part["choices"][0] for part in stream(make(stream=True), parts)[:-1]]
    assert (last["stop_reason"], last["matched_stop"]) == (reason, matched)
    assert all(choice["stop_reason"] is choice["matched_stop"] is None for choice in before)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"include_reasoning": False}),
        ({"reasoning": ""}, {}),
        ({"reasoning": "", "calls": (), "text": "Hm"}, {"separate_reasoning": False}),
    ],
)
def test_an_answer_without_reasoning_says_so(
    changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Clients read the attribute, whether it is there or not."""
    answer = json.loads(chat(**fields).whole([divided(**changes)], [PROMPT]))
    assert strict(ChatCompletion, answer).choices[0].message.model_extra == NO_REASONING
    assert answer["prompt_logprobs"] is answer["prompt_token_ids"] is None
    assert answer["kv_transfer_params"] is answer["choices"][0]["token_ids"] is None
    for part in stream(chat(stream=True, **fields), events())[:-1]:
        delta = strict(ChatCompletionChunk, part).choices[0].delta
        assert delta.reasoning is delta.reasoning_content is None
    assert answer["usage"]["reasoning_tokens"] == 0


CALLS = (ToolCall("call_1", "add", '{"a": 1}'), ToolCall("call_2", "now", "{}"))
CALL_EVENTS = [
    TextEvent(0, 0, "", (), None, 1, (1,), reasoning="so "),
    TextEvent(0, 0, "", (), None, 1, (2,), reasoning="it is"),
    TextEvent(0, 0, "Let me", (), None, 1, (3,)),
    TextEvent(0, 0, "", (), None, 1, (4,)),
    TextEvent(0, 0, "", (), None, 1, (5,), calls=(CallDelta(0, "add", "", "call_1"),)),
    TextEvent(
        *(0, 0, "", (), None, 1, (6,)),
        calls=(CallDelta(0, None, '{"a": 1}'), CallDelta(1, "now", "{}", "call_2")),
    ),
    TextEvent(0, 0, "", (), "eos", 1, (7,)),
]


def divided(**changes: Any) -> ChoiceResult:
    whole = ChoiceResult(0, 0, "Let me", (), "eos", 7, reasoning="so it is", calls=CALLS)
    return msgspec.structs.replace(whole, **changes)


def test_calls_and_reasoning_of_a_whole_answer() -> None:
    answer = json.loads(chat().whole([divided()], [PROMPT]))
    choice = strict(ChatCompletion, answer).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me")
    assert [
        (c.id, c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ] == [(call.id, "function", call.name, call.arguments) for call in CALLS]
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "so it is"


@pytest.mark.parametrize(
    ("changes", "content", "reason"),
    [
        ({"text": ""}, None, "tool_calls"),
        ({"text": "", "finish": "length"}, None, "length"),
        ({"finish": "stop"}, "Let me", "tool_calls"),
        ({"text": "", "calls": ()}, "", "stop"),
    ],
)
def test_content_and_finish_reason_beside_calls(
    changes: dict[str, Any], content: str | None, reason: str
) -> None:
    answer = json.loads(chat().whole([divided(**changes)], [PROMPT]))
    choice = strict(ChatCompletion, answer).choices[0]
    assert (choice.message.content, choice.finish_reason) == (content, reason)


OLDER = {"functions": [{"name": "add"}]}


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "function_call"), ({"name": "add"}, "stop")]
)
def test_a_call_of_an_older_function(choice: Any, reason: str) -> None:
    asked, call = {**OLDER, "function_call": choice}, CALLS[:1]
    answer = json.loads(chat(**asked).whole([divided(calls=call, text="")], [PROMPT]))
    found = strict(ChatCompletion, answer).choices[0]
    function = found.message.function_call
    assert (found.finish_reason, found.message.content) == (reason, None)
    assert (function.name, function.arguments) == ("add", '{"a": 1}')
    assert "tool_calls" not in answer["choices"][0]["message"]
    last = msgspec.structs.replace(CALL_EVENTS[5], calls=CALL_EVENTS[5].calls[:1])
    *parts, _ = stream(chat(stream=True, **asked), [*CALL_EVENTS[:5], last, CALL_EVENTS[6]])
    chunks = [strict(ChatCompletionChunk, part).choices[0] for part in parts]
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert [delta["function_call"] for delta in deltas if "function_call" in delta] == [
        {"arguments": "", "name": "add"},
        {"arguments": '{"a": 1}'},
    ]
    assert not any("tool_calls" in delta for delta in deltas)
    assert chunks[-1].finish_reason == reason


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": "a', '{"input": "a'), ("", "")],
)
def test_calls_of_custom_tools(arguments: str, text: str) -> None:
    """Whole as the SDK's types have them. A stream has the input in one piece."""
    tools = {"tools": [{"type": "custom", "custom": {"name": "add"}}]}
    calls = (ToolCall("call_1", "add", arguments), CALLS[1])
    answer = json.loads(chat(**tools).whole([divided(calls=calls)], [PROMPT]))
    choice = strict(ChatCompletion, answer).choices[0]
    first, second = choice.message.tool_calls
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "add", text)
    assert (second.type, second.function.name) == ("function", "now")
    assert choice.finish_reason == "tool_calls"
    pieces = [arguments[:9], arguments[9:]]
    deltas = [CallDelta(0, "add", pieces[0], "call_1"), CallDelta(0, None, pieces[1])]
    for following in ((), (CallDelta(1, "now", "{}", "call_2"),)):
        events = [TextEvent(0, 0, "", (), None, 1, (5,), calls=(delta,)) for delta in deltas]
        events.append(TextEvent(0, 0, "", (), "eos", 1, (7,), calls=following))
        *parts, _ = stream(chat(stream=True, **tools), events)
        sent = [
            each for part in parts for each in part["choices"][0]["delta"].get("tool_calls", ())
        ]
        begun = {"index": 0, "custom": {"input": "", "name": "add"}}
        assert sent[0] == {**begun, "id": "call_1", "type": "custom"}
        assert sent[1] == {"index": 0, "custom": {"input": text}}
        assert [each["id"] for each in sent[2:]] == [call.id for call in following]
        assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_streamed_calls_and_reasoning() -> None:
    *parts, done = stream(chat(stream=True), CALL_EVENTS)
    chunks = [strict(ChatCompletionChunk, part).choices[0] for part in parts]
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert done == "[DONE]"
    assert deltas[1] == {"reasoning": "so ", "reasoning_content": "so "}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me"
    begun = {"index": 0, "function": {"arguments": "", "name": "add"}}
    calls = [{**begun, "id": "call_1", "type": "function"}]
    assert deltas[4] == {"tool_calls": calls, **NO_REASONING}
    assert deltas[5]["tool_calls"][0] == {"index": 0, "function": {"arguments": '{"a": 1}'}}
    assert deltas[6]["tool_calls"][0]["id"] == "call_2"
    assert all(len(delta.get("tool_calls") or [{}]) == 1 for delta in deltas)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
