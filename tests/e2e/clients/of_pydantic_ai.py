"""pydantic-ai: its ways to typed output, tools, streams, by both of OpenAI's APIs."""

from typing import Any

from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ModelMessage, ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    TOOLS,
    AnyObject,
    Request,
    check,
    run,
)

SETTINGS = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)


def chat(url: str, model: str = JSON) -> Model[Any]:
    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))


def responses(url: str, model: str) -> Model[Any]:
    return OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))


def typed_outputs(url: str) -> None:
    for kind in (chat, responses):
        for output in (Request, ToolOutput(Request, strict=True), NativeOutput(Request)):
            model = kind(url, JSON if isinstance(output, NativeOutput) else TOOLS)
            agent = Agent(model, output_type=output, model_settings=SETTINGS, retries=0)
            answer = agent.run_sync(MESSAGE).output
            check(isinstance(answer, Request), f"{type(model).__name__}, {output}: {answer}")


def prompted_output(url: str) -> None:
    """The schema is in the prompt alone, so any object is an answer."""
    agent = Agent(
        chat(url), output_type=PromptedOutput(AnyObject), model_settings=SETTINGS, retries=0
    )
    check(isinstance(agent.run_sync(MESSAGE).output, AnyObject), "PromptedOutput")


def streamed_output(url: str) -> None:
    agent = Agent(chat(url), output_type=NativeOutput(Request), model_settings=SETTINGS, retries=0)
    with agent.run_stream_sync(MESSAGE) as stream:
        parts = [*stream.stream_output(debounce_by=None)]
        check(isinstance(stream.get_output(), Request), f"stream: {parts}")


def tools(url: str) -> None:
    asked: list[str] = []

    def order_state(order: int) -> str:
        """State of an order by its number."""
        asked.append(str(order))
        return "sent"

    agent = Agent(
        chat(url, TOOLS), tools=[order_state], output_type=[str], model_settings=SETTINGS, retries=2
    )
    result = agent.run_sync("Where is order 10442?")
    check(isinstance(result.output, str), "an answer beside tools")
    check(len(asked) == len(calls(result.all_messages())), f"calls that ran: {asked}")


def calls(messages: list[ModelMessage]) -> list[ToolCallPart]:
    parts = [part for message in messages for part in message.parts]
    return [part for part in parts if isinstance(part, ToolCallPart)]


if __name__ == "__main__":
    run(typed_outputs, prompted_output, streamed_output, tools)
