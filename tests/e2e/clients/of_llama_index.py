"""llama-index's client of servers like OpenAI's: structured programs and tools."""

import json

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

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


def model(url: str, name: str, *, structured: bool) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=structured,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        context_window=1024,
    )


def structured(url: str) -> None:
    for by_schema in (True, False):
        ask = model(url, JSON if by_schema else TOOLS, structured=by_schema)
        answer = ask.structured_predict(Request, PromptTemplate("{m}"), m=MESSAGE)
        check(isinstance(answer, Request), f"structured_predict, by schema {by_schema}")
    answer = model(url, TOOLS, structured=False).as_structured_llm(Request).complete(MESSAGE)
    check(isinstance(answer.raw, Request), "as_structured_llm")


def weather(city: str) -> str:
    """Weather of a city."""
    return json.dumps({"city": city})


def tools(url: str) -> None:
    ask = model(url, TOOLS, structured=False)
    tool = FunctionTool.from_defaults(weather)
    question = [ChatMessage("What is the weather in Porto?")]
    answer = ask.chat_with_tools([tool], chat_history=question, tool_required=True)
    calls = ask.get_tool_calls_from_response(answer)
    check(all(set(call.tool_kwargs) == {"city"} for call in calls), f"calls: {calls}")


if __name__ == "__main__":
    run(structured, tools)
