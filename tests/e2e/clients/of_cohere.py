"""Cohere's own client: chats, whole and streamed, tools, forms, errors."""

import json
from typing import Any

import cohere

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    SCHEMA,
    TOOL,
    TOOLS,
    check,
    check_weather,
    run,
)

MESSAGES: list[Any] = [{"role": "user", "content": MESSAGE}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Porto?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}


def client(url: str) -> cohere.ClientV2:
    return cohere.ClientV2(base_url=url, api_key=KEY)


def text_of(answer: Any) -> str:
    return "".join(part.text for part in answer.message.content or [] if part.type == "text")


def chats(url: str) -> None:
    answer = client(url).chat(model=JSON, messages=MESSAGES, logprobs=True, **GREEDY)
    text = text_of(answer)
    check(text.startswith("{") and answer.finish_reason == "COMPLETE", f"chat: {answer}")
    check((answer.usage.tokens.output_tokens or 0) == len(answer.logprobs or []), "usage")
    pieces, kinds = [], set()
    for event in client(url).chat_stream(model=JSON, messages=MESSAGES, **GREEDY):
        kinds.add(event.type)
        if event.type == "content-delta":
            pieces.append(event.delta.message.content.text)
    check("".join(pieces) == text, f"chat_stream: {pieces}")
    check({"message-start", "content-start", "content-end", "message-end"} <= kinds, f"{kinds}")
    stopped = client(url).chat(
        model=JSON, messages=MESSAGES, stop_sequences=[text[10:14]], **GREEDY
    )
    check(stopped.finish_reason == "STOP_SEQUENCE", f"stop: {stopped}")


def forms(url: str) -> None:
    answer = client(url).chat(
        model=JSON,
        messages=MESSAGES,
        response_format={"type": "json_object", "json_schema": SCHEMA},
        **GREEDY,
    )
    check(set(json.loads(text_of(answer))) == set(SCHEMA["properties"]), "response_format")


def tools(url: str) -> None:
    asked: dict[str, Any] = {"model": TOOLS, "tools": [TOOL], **GREEDY}
    answer = client(url).chat(messages=QUESTION, tool_choice="REQUIRED", **asked)
    calls = answer.message.tool_calls or []
    check(answer.finish_reason == "TOOL_CALL" and bool(calls), f"tools: {answer}")
    check_weather(json.loads(calls[0].function.arguments), "arguments")
    arguments, names = "", []
    for event in client(url).chat_stream(messages=QUESTION, tool_choice="REQUIRED", **asked):
        if event.type == "tool-call-start":
            names.append(event.delta.message.tool_calls.function.name)
        if event.type == "tool-call-delta":
            arguments += event.delta.message.tool_calls.function.arguments
    check(names[:1] == ["weather"], f"calls of a stream: {names}")
    check(arguments == "".join(call.function.arguments for call in calls), arguments)
    document = {"type": "document", "document": {"data": json.dumps({"degrees": 21})}}
    results = [{"role": "tool", "tool_call_id": c.id, "content": [document]} for c in calls]
    turns: list[Any] = [*QUESTION, answer.message, *results]
    told = client(url).chat(messages=turns, tool_choice="NONE", **asked)
    check(not told.message.tool_calls, f"after the results: {told}")


def errors(url: str) -> None:
    try:
        client(url).chat(model=JSON, messages=MESSAGES, documents=["a"])
    except cohere.BadRequestError as error:
        check("`documents`" in str(error.body), f"body: {error.body}")
    else:
        check(False, "documents were read")


if __name__ == "__main__":
    run(chats, forms, tools, errors)
