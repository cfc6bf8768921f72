"""OpenAI's own client: parsed answers, helpers of streams and tools, the Responses API."""

import json
import time
from typing import Any, Literal

import openai
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel, Field

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    TOOL,
    TOOLS,
    Request,
    check,
    check_weather,
    run,
)

MESSAGES: list[Any] = [{"role": "user", "content": MESSAGE}]
TOOLBOX: list[Any] = [TOOL]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Porto?"}]


class Weather(BaseModel):
    """Weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def parsed_answers(url: str) -> None:
    for temperature in (0.0, 1.5):
        whole = client(url).chat.completions.parse(
            model=JSON,
            messages=MESSAGES,
            response_format=Request,
            temperature=temperature,
            seed=5,
            n=2,
            max_completion_tokens=MAX_TOKENS,
        )
        for choice in whole.choices:
            check(isinstance(choice.message.parsed, Request), f"parsed: {choice}")
            check(choice.finish_reason == "stop", "finish_reason")


def streamed_answer(url: str) -> None:
    with client(url).chat.completions.stream(
        model=JSON, messages=MESSAGES, response_format=Request, temperature=0, max_tokens=MAX_TOKENS
    ) as stream:
        events = [*stream]
        whole = stream.get_final_completion()
    check(isinstance(whole.choices[0].message.parsed, Request), "parsed of a stream")
    kinds = {event.type for event in events}
    check({"chunk", "content.delta", "content.done"} <= kinds, f"events: {kinds}")


def json_object(url: str) -> None:
    whole = client(url).chat.completions.create(
        model=JSON,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    check(isinstance(json.loads(whole.choices[0].message.content or ""), dict), "json_object")


def calls_of_tools(url: str) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    named = {"type": "function", "function": {"name": "weather"}}
    choices: tuple[Any, ...] = ("required", named)
    for choice in choices:
        whole = client(url).chat.completions.parse(
            model=TOOLS,
            messages=QUESTION,
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
        check_call(whole)


def check_call(whole: ParsedChatCompletion[None]) -> None:
    choice = whole.choices[0]
    calls = choice.message.tool_calls or []
    check(len(calls) == 1, f"one call: {choice}")
    check(isinstance(calls[0].function.parsed_arguments, Weather), f"parsed call: {calls}")
    check(bool(calls[0].id), "id of a call")


def streamed_calls(url: str) -> None:
    with client(url).chat.completions.stream(
        model=TOOLS,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Weather, name="weather")],
        tool_choice="required",
        temperature=0,
        max_tokens=MAX_TOKENS,
    ) as stream:
        events = [*stream]
        whole = stream.get_final_completion()
    check(whole.choices[0].finish_reason == "tool_calls", "finish_reason of a stream of calls")
    calls = whole.choices[0].message.tool_calls or []
    check(all(isinstance(c.function.parsed_arguments, Weather) for c in calls), f"{calls}")
    done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    check([e.arguments for e in done] == [c.function.arguments for c in calls], "arguments.done")


def tool_messages(url: str) -> None:
    first: Any = client(url).chat.completions.create(
        model=TOOLS,
        messages=QUESTION,
        tools=TOOLBOX,
        tool_choice="required",
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    message = first.choices[0].message
    calls = message.tool_calls or []
    check(first.choices[0].finish_reason == "tool_calls", "finish_reason of calls")
    answers: list[Any] = [
        {"role": "tool", "tool_call_id": c.id, "content": "21 degrees"} for c in calls
    ]
    history: list[Any] = [*QUESTION, message.model_dump(exclude_none=True), *answers]
    second = client(url).chat.completions.create(
        model=TOOLS,
        messages=history,
        tools=TOOLBOX,
        tool_choice="none",
        temperature=0,
        max_tokens=40,
    )
    check(not second.choices[0].message.tool_calls, "no calls where the choice is none")


def parsed_responses(url: str) -> None:
    whole = client(url).responses.parse(
        model=JSON,
        input=MESSAGE,
        text_format=Request,
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    )
    check(isinstance(whole.output_parsed, Request), f"parsed response: {whole.output}")
    check(whole.status == "completed", "status")
    with client(url).responses.stream(
        model=JSON,
        input=MESSAGE,
        text_format=Request,
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    ) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    check(streamed.output_parsed == whole.output_parsed, "streamed response")
    check(
        {"response.created", "response.output_text.delta", "response.completed"} <= kinds, "kinds"
    )


def responses_call_tools(url: str) -> None:
    flat: list[Any] = [{"type": "function", "strict": True, **TOOL["function"]}]
    whole = client(url).responses.create(
        model=TOOLS,
        input="What is the weather in Porto?",
        tools=flat,
        tool_choice="required",
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    )
    calls = [item for item in whole.output if item.type == "function_call"]
    check(len(calls) >= 1, f"calls of a response: {whole.output}")
    for call in calls:
        check_weather(json.loads(call.arguments), "arguments of a response's call")


def what_agents_ask_for(url: str) -> None:
    """Logprobs, storage and hints, by their names on both routes."""
    whole = client(url).responses.create(
        model=JSON,
        input=MESSAGE,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=2,
        store=True,
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    )
    text: Any = whole.output[0]
    tokens = text.content[0].logprobs
    check("".join(token.token for token in tokens) == whole.output_text, f"logprobs: {tokens}")
    check(all(len(token.top_logprobs) == 2 for token in tokens), "alternatives")
    raw = client(url).chat.completions.with_raw_response.create(
        model=JSON, messages=MESSAGES, max_tokens=4, reasoning_effort="low", verbosity="low"
    )
    unbound = raw.headers["x-loraplex-unbound"]
    check(unbound == "reasoning_effort, verbosity", f"hints: {unbound}")


def custom_tools(url: str) -> None:
    """As codex has them, with a template that reads no tools."""
    tools: list[Any] = [
        {
            "type": "custom",
            "name": "date",
            "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}-[0-9]{2}"},
        },
        {"type": "local_shell"},
    ]
    for choice in ({"type": "custom", "name": "date"}, "auto"):
        chosen: Any = choice
        whole = client(url).responses.create(
            model=JSON,
            input=MESSAGE,
            tools=tools,
            tool_choice=chosen,
            temperature=0,
            max_output_tokens=MAX_TOKENS,
        )
        if choice == "auto":
            check(whole.status in ("completed", "incomplete"), f"status: {whole.status}")
            continue
        [call] = [item for item in whole.output if item.type == "custom_tool_call"]
        check(len(call.input) == 7 and call.input[4] == "-", f"input: {call.input}")


def files_and_batches(url: str) -> None:
    bodies = [
        {"model": JSON, "messages": MESSAGES, "max_tokens": 4},
        {"model": "nobody", "messages": MESSAGES, "max_tokens": 4},
    ]
    route: Any = "/v1/chat/completions"
    lines = [
        json.dumps({"custom_id": f"{number}", "method": "POST", "url": route, "body": body})
        for number, body in enumerate(bodies)
    ]
    api = client(url)
    file = api.files.create(
        file=("in.jsonl", "\n".join(lines).encode()),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    check(file.expires_at == file.created_at + 3600, f"expires_at: {file}")
    check(api.files.retrieve(file.id) == file, "retrieved file")
    check(api.files.content(file.id).text == "\n".join(lines), "content")
    check(file.id in [one.id for one in api.files.list(purpose="batch", limit=1)], "listed file")
    batch = api.batches.create(
        input_file_id=file.id, endpoint=route, completion_window="24h", metadata={"a": "b"}
    )
    while batch.status not in ("completed", "failed"):
        time.sleep(0.1)
        batch = api.batches.retrieve(batch.id)
    counts = batch.request_counts
    check(counts is not None and (counts.completed, counts.failed) == (1, 1), f"counts: {batch}")
    check(batch.id in [one.id for one in api.batches.list(limit=1)], "listed batch")
    good = json.loads(api.files.content(batch.output_file_id or "").text)
    check(good["response"]["body"]["object"] == "chat.completion", f"answer: {good}")
    bad = json.loads(api.files.content(batch.error_file_id or "").text)
    check(bad["response"]["status_code"] in (403, 404), f"error: {bad}")
    try:
        api.batches.cancel(batch.id)
        check(False, "a batch that is over was cancelled")
    except openai.ConflictError:
        pass
    check(api.files.delete(file.id).deleted, "deleted")


if __name__ == "__main__":
    run(
        parsed_answers,
        streamed_answer,
        json_object,
        calls_of_tools,
        streamed_calls,
        tool_messages,
        parsed_responses,
        responses_call_tools,
        what_agents_ask_for,
        custom_tools,
        files_and_batches,
    )
