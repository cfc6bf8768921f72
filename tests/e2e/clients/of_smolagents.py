"""smolagents' model of servers like OpenAI's: calls of tools, schemas."""

from smolagents import OpenAIServerModel, Tool, tool
from smolagents.models import ChatMessage, MessageRole

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    SCHEMA,
    TOOLS,
    Request,
    check,
    run,
)


@tool
def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Its name.
    """
    return f"21 degrees in {city}"


def model(url: str, name: str) -> OpenAIServerModel:
    return OpenAIServerModel(
        name, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=MAX_TOKENS
    )


def asked(text: str) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


def tools(url: str) -> None:
    """As a ToolCallingAgent asks; its own prompt is longer than the demo's context."""
    tool: Tool = weather
    ask = model(url, TOOLS)
    answer = ask.generate(asked("What is the weather in Porto?"), tools_to_call_from=[tool])
    calls = ask.parse_tool_calls(answer).tool_calls
    check(calls is not None and calls[0].function.name == "weather", f"calls: {calls}")
    check(set(calls[0].function.arguments) == {"city"}, f"arguments: {calls}")


def schema(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}}
    answer = model(url, JSON).generate(asked(MESSAGE), response_format=form)
    Request.model_validate_json(str(answer.content))


if __name__ == "__main__":
    run(tools, schema)
