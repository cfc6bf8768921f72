"""Anthropic's own client: messages, whole and streamed, tools, counts, errors."""

from typing import Any

import anthropic

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
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Porto?"}]
WEATHER: Any = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}


# The client has no argument for it; the route has the field.
GREEDY = {"temperature": 0}


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def ask(url: str, **fields: Any) -> anthropic.types.Message:
    asked: dict[str, Any] = {
        "model": JSON,
        "messages": MESSAGES,
        "max_tokens": MAX_TOKENS,
        "extra_body": GREEDY,
    }
    found: anthropic.types.Message = client(url).messages.create(**(asked | fields))
    return found


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def whole_answer(url: str) -> None:
    answer = ask(url, metadata={"user_id": "me"})
    check(
        (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn"), ""
    )
    check(text_of(answer).startswith("{"), f"text: {answer.content}")
    check(answer.id.startswith("msg_") and answer._request_id in answer.id, "ids")
    check(answer.usage.output_tokens > 0, "usage")


def system_and_blocks(url: str) -> None:
    """A list of one block means the same as its text."""
    system = "Answer in capital letters."
    plain = ask(url, system=system)
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": MESSAGE, **mark}]
    listed = ask(
        url,
        system=[{"type": "text", "text": system, **mark}],
        messages=[{"role": "user", "content": blocks}],
    )
    check(text_of(plain) == text_of(listed), "blocks")
    counts = [answer.usage for answer in (plain, listed, ask(url))]
    sizes = [count.input_tokens + (count.cache_read_input_tokens or 0) for count in counts]
    check(sizes[0] == sizes[1] > sizes[2], f"the system is read: {sizes}")


def ends(url: str) -> None:
    whole = text_of(ask(url))
    stop = whole[10:14]
    stopped = ask(url, stop_sequences=[stop, "no such text"])
    check((stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop), "stop_sequence")
    check(text_of(stopped) == whole[: whole.index(stop)], "text before it")
    cut = ask(url, max_tokens=4)
    check((cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 4), "max_tokens")


def goes_on(url: str) -> None:
    whole = text_of(ask(url))
    begun = [*MESSAGES, {"role": "assistant", "content": whole[:10]}]
    check(whole[:10] + text_of(ask(url, messages=begun)) == whole, "the answer goes on")


def streams(url: str) -> None:
    whole = ask(url)
    with client(url).messages.stream(
        model=JSON, messages=MESSAGES, max_tokens=MAX_TOKENS, extra_body=GREEDY
    ) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    check(text_of(streamed) == text_of(whole), "text of a stream")
    check(streamed.stop_reason == whole.stop_reason, "stop_reason of a stream")
    check(streamed.usage.output_tokens == whole.usage.output_tokens, "usage of a stream")
    check({"message_start", "content_block_delta", "text", "message_stop"} <= kinds, f"{kinds}")


def shaped_answer(url: str) -> None:
    answer = client(url).messages.parse(
        model=JSON, messages=MESSAGES, max_tokens=MAX_TOKENS, output_format=Request
    )
    check(isinstance(answer.parsed_output, Request), f"parsed: {answer}")


def tools(url: str) -> None:
    choices: tuple[Any, ...] = ({"type": "any"}, {"type": "tool", "name": "weather"})
    for choice in choices:
        answer = ask(url, model=TOOLS, messages=QUESTION, tools=[WEATHER], tool_choice=choice)
        calls = [block for block in answer.content if block.type == "tool_use"]
        check(answer.stop_reason == "tool_use" and bool(calls), f"calls: {answer}")
        check_weather(dict(calls[0].input), "input of a call")
    with client(url).messages.stream(
        model=TOOLS,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice=choices[1],
        max_tokens=MAX_TOKENS,
        extra_body=GREEDY,
    ) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    inputs = [block.input for block in streamed.content if block.type == "tool_use"]
    check(inputs == [call.input for call in calls], f"calls of a stream: {streamed.content}")
    check("input_json" in kinds, f"events of a stream of calls: {kinds}")
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": "21 degrees", "is_error": False}
        for c in calls
    ]
    turns = [*QUESTION, answer.to_param(), {"role": "user", "content": results}]
    told = ask(url, model=TOOLS, messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
    check(all(block.type == "text" for block in told.content), "no calls where the choice is none")


def runs_tools(url: str) -> None:
    """The helper asks for a thread first, and goes on without one."""
    asked: list[str] = []

    @anthropic.beta_tool(input_schema=WEATHER["input_schema"])
    def weather(city: str, unit: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return f"21 degrees {unit}"

    for model in (TOOLS, JSON):
        runner = client(url).beta.messages.tool_runner(
            model=model,
            messages=QUESTION,
            tools=[weather],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=MAX_TOKENS,
            max_iterations=2,
            extra_body=GREEDY,
        )
        messages = [*runner]
        check(len(messages) == 2, f"answers of {model}: {messages}")
    check(len(asked) >= 2, "calls of the runner")


def tools_without_a_template(url: str) -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    answer = ask(url, messages=QUESTION, tools=[WEATHER], tool_choice=choice)
    calls = [block for block in answer.content if block.type == "tool_use"]
    check_weather(dict(calls[0].input), "input of a call without a template")
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": "21"} for c in calls]
    turns = [*QUESTION, answer.to_param(), {"role": "user", "content": results}]
    check(ask(url, messages=turns, tools=[WEATHER]).type == "message", "a loop without a template")


def thinking(url: str) -> None:
    raw = client(url).messages.with_raw_response.create(
        model=JSON,
        messages=MESSAGES,
        max_tokens=MAX_TOKENS,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
    )
    unbound = {*raw.headers["x-loraplex-unbound"].split(", ")}
    expected = {"thinking", "thinking.budget_tokens", "output_config.effort"}
    check(unbound == expected, f"hints: {unbound}")


def counts(url: str) -> None:
    asked: Any = {"model": TOOLS, "messages": QUESTION, "system": "Be kind."}
    for more in ({}, {"tools": [WEATHER]}):
        counted = client(url).messages.count_tokens(**asked, **more).input_tokens
        usage = ask(url, **asked, **more, max_tokens=1).usage
        read = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        check(counted == read, f"counted {counted}, read {read}")


def errors(url: str) -> None:
    image: Any = [{"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}]
    wrong: tuple[tuple[type[anthropic.APIStatusError], str, dict[str, Any]], ...] = (
        (anthropic.NotFoundError, "not_found_error", {"model": "no-such-adapter"}),
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"temperature": -1}}),
        (anthropic.BadRequestError, "invalid_request_error", {"max_tokens": 9000}),
        (
            anthropic.BadRequestError,
            "invalid_request_error",
            {"messages": [{"role": "user", "content": image}]},
        ),
    )
    for kind, name, fields in wrong:
        try:
            ask(url, **fields)
        except kind as error:
            body: Any = error.body
            check(body["error"]["type"] == name, f"{fields}: {body}")
            check(error.request_id == body["request_id"], f"{fields}: {error.request_id}")
        else:
            check(False, f"refused: {fields}")


if __name__ == "__main__":
    run(
        whole_answer,
        system_and_blocks,
        ends,
        goes_on,
        streams,
        shaped_answer,
        tools,
        runs_tools,
        tools_without_a_template,
        thinking,
        counts,
        errors,
    )
