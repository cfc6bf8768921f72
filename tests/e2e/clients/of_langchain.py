"""LangChain: structured output by all three methods, bound tools, streams, the Responses API."""

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

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


def chat(url: str, model: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key=KEY,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        **more,
    )


def structured_output(url: str) -> None:
    for method, model in (("json_schema", JSON), ("function_calling", TOOLS)):
        for strict in (None, True):
            ask = chat(url, model).with_structured_output(Request, method=method, strict=strict)
            check(isinstance(ask.invoke(MESSAGE), Request), f"{method}, strict {strict}")


def json_mode(url: str) -> None:
    ask = chat(url, JSON).with_structured_output(None, method="json_mode")
    check(isinstance(ask.invoke(MESSAGE), dict), "json_mode")


def streamed_structure(url: str) -> None:
    schema = {"title": "request", **Request.model_json_schema()}
    ask = chat(url, JSON).with_structured_output(schema, method="json_schema")
    parts = [*ask.stream(MESSAGE)]
    check(set(parts[-1]) == set(Request.model_fields), f"last of a stream: {parts[-1]}")


def bound_tools(url: str) -> None:
    question = HumanMessage("What is the weather in Porto?")
    for choice in ("any", "weather"):
        model = chat(url, TOOLS).bind_tools([TOOL], tool_choice=choice)
        answer = model.invoke([question])
        check(len(answer.tool_calls) >= 1, f"calls: {answer}")
        for call in answer.tool_calls:
            check_weather(call["args"], "arguments")
    gathered = None
    for part in model.stream([question]):
        gathered = part if gathered is None else gathered + part
    check(gathered is not None and gathered.tool_calls[0]["args"] != {}, f"stream: {gathered}")
    results = [ToolMessage("21 degrees", tool_call_id=c["id"]) for c in answer.tool_calls]
    again = chat(url, TOOLS).bind_tools([TOOL]).invoke([question, answer, *results])
    check(bool(again.content) or bool(again.tool_calls), "an answer to a tool's result")


def responses(url: str) -> None:
    model = chat(url, JSON, use_responses_api=True)
    ask = model.with_structured_output(Request, method="json_schema")
    check(isinstance(ask.invoke(MESSAGE), Request), "json_schema by responses")


if __name__ == "__main__":
    run(structured_output, json_mode, streamed_structure, bound_tools, responses)
