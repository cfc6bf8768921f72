"""semantic-kernel's Responses agent: text, types, tools, streams, threads that the server keeps."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.agents import OpenAIResponsesAgent, ResponsesAgentThread
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.contents import FunctionCallContent, FunctionResultContent
from semantic_kernel.functions import kernel_function

from tests.e2e.clients.asking import JSON, KEY, MAX_TOKENS, MESSAGE, TOOLS, Request, check, run

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": MAX_TOKENS}


class Cancelling:
    """A plugin. orders: for which it was called. To the model `order` of the plugin `cancel` is
    `cancel-order`, a name that the demo's adapter can repeat.
    """

    def __init__(self) -> None:
        self.orders: list[str] = []

    @kernel_function
    def order(self, customer: str, order: str, product: str) -> str:
        self.orders.append(order)
        return json.dumps({"status": "cancelled", "order": order})


def agent(url: str, model: str, **options: Any) -> OpenAIResponsesAgent:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return OpenAIResponsesAgent(
        ai_model_id=model, client=client, name="a", instructions="Be brief.", **(GREEDY | options)
    )


async def text(url: str) -> None:
    """Whole and as a stream, without threads that the server keeps."""
    asked = agent(url, "pirate", store_enabled=False)
    answer = await asked.get_response(MESSAGE)
    check(bool(str(answer.message)), "text")
    pieces = [str(piece.message) async for piece in asked.invoke_stream(MESSAGE)]
    check("".join(pieces) == str(answer.message), f"stream: {pieces}")


async def types(url: str) -> None:
    form = OpenAIResponsesAgent.configure_response_format(Request)
    answer = await agent(url, JSON, text=form).get_response(MESSAGE)
    check(Request.model_validate_json(str(answer.message)) is not None, "response_format")


async def tools(url: str) -> None:
    """Each call's result goes back to the model, whole and in streams."""
    plugin, kernel = Cancelling(), Kernel()
    kernel.add_plugin(plugin, "cancel")
    asked = agent(url, TOOLS, kernel=kernel)
    seen: list[Any] = []

    async def noted(message: Any) -> None:
        seen.extend(message.items)

    options: dict[str, Any] = {
        "function_choice_behavior": FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=2),
        "on_intermediate_message": noted,
    }
    async for answer in asked.invoke(MESSAGE, **options):
        check(answer.thread.id is not None, "the answer's thread")
    calls = [item for item in seen if isinstance(item, FunctionCallContent)]
    results = [item for item in seen if isinstance(item, FunctionResultContent)]
    check(bool(calls) and calls[0].name == "cancel-order", f"calls: {calls}")
    check("10442" in plugin.orders[0] and "10442" in str(results[0].result), f"{results}")
    before = len(plugin.orders)
    async for _ in asked.invoke_stream(MESSAGE, **options):
        pass
    check(len(plugin.orders) > before, "calls of a stream")


async def threads(url: str) -> None:
    """The second turn names the first answer; the server lists what both were made from."""
    asked = agent(url, "pirate")
    first = await asked.get_response(MESSAGE)
    thread = first.thread
    check(isinstance(thread, ResponsesAgentThread) and bool(thread.response_id), "a thread")
    before = thread.response_id
    second = await asked.get_response("And the price?", thread=thread)
    check(second.thread is thread and thread.response_id != before, "the thread goes on")
    told = [str(each) async for each in thread.get_messages(sort_order="asc")]
    check(told == [MESSAGE, str(first.message), "And the price?"], f"messages: {told}")


async def errors(url: str) -> None:
    try:
        await agent(url, "no-such-adapter").get_response(MESSAGE)
    except Exception as error:
        check("no-such-adapter" in str(error), f"error: {error}")
    else:
        check(False, "an unknown adapter answered")


def main() -> None:
    with asyncio.Runner() as runner:  # one loop: the agents' connections end in it

        def step(body: Callable[[str], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
            return wraps(body)(lambda url: runner.run(body(url)))

        run(*map(step, (text, types, tools, threads, errors)))


if __name__ == "__main__":
    main()
