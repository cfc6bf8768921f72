"""openai-agents, with its default Responses model and its chat model: tools, types, streams."""

import asyncio
import json

import agents
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    TOOLS,
    Request,
    check,
    run,
)

SETTINGS = agents.ModelSettings(temperature=0, max_tokens=MAX_TOKENS)


@agents.function_tool
def weather(city: str) -> str:
    """Weather of a city."""
    return json.dumps({"city": city, "degrees": 21})


def client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def models(url: str, name: str) -> tuple[agents.Model, agents.Model]:
    """Each with a client of its own: connections stay with their event loop."""
    return (
        agents.OpenAIResponsesModel(name, client(url)),
        agents.OpenAIChatCompletionsModel(name, client(url)),
    )


def text(url: str) -> None:
    """The default model, with no setting but the client."""
    agents.set_default_openai_client(client(url), use_for_tracing=False)
    agent = agents.Agent(name="a", model="pirate", model_settings=SETTINGS)
    answer = agents.Runner.run_sync(agent, MESSAGE)
    check(isinstance(answer.final_output, str) and bool(answer.final_output), "text")


def output_types(url: str) -> None:
    for model in models(url, JSON):
        agent = agents.Agent(name="a", model=model, output_type=Request, model_settings=SETTINGS)
        answer = agents.Runner.run_sync(agent, MESSAGE)
        check(isinstance(answer.final_output, Request), f"{type(model).__name__}: output_type")


def tool_calls(url: str) -> None:
    for model in models(url, TOOLS):
        agent = agents.Agent(
            name="a",
            model=model,
            tools=[weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=SETTINGS.resolve(agents.ModelSettings(tool_choice="required")),
        )
        answer = agents.Runner.run_sync(agent, "What is the weather in Porto?")
        check(json.loads(answer.final_output)["degrees"] == 21, f"{type(model).__name__}: tool")


def tool_results(url: str) -> None:
    """The result goes back to the model, which then answers or calls again."""
    agent = agents.Agent(
        name="a", model=models(url, TOOLS)[0], tools=[weather], model_settings=SETTINGS
    )
    try:
        answer = agents.Runner.run_sync(agent, "What is the weather in Porto?", max_turns=3)
    except agents.MaxTurnsExceeded:
        return
    check(isinstance(answer.final_output, str), "an answer beside tools")


def streams(url: str) -> None:
    for model in models(url, JSON):
        agent = agents.Agent(name="a", model=model, output_type=Request, model_settings=SETTINGS)
        asyncio.run(streamed(agent))


async def streamed(agent: agents.Agent) -> None:
    result = agents.Runner.run_streamed(agent, MESSAGE)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    check(isinstance(result.final_output, Request), "output_type of a stream")
    check(Request.model_validate_json("".join(pieces)) == result.final_output, "pieces")


if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    run(text, output_types, tool_calls, tool_results, streams)
