"""litellm: schemas and tools by both APIs, whole and streamed."""

import json
import os
from typing import Any

# litellm asks for a list of prices over the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

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


def settings(url: str, model: str) -> dict[str, Any]:
    place = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": KEY}
    return {**place, "temperature": 0, "max_tokens": MAX_TOKENS, "num_retries": 0}


def schema(url: str) -> None:
    messages = [{"role": "user", "content": MESSAGE}]
    for provider in ("openai", "hosted_vllm"):
        asked = settings(url, JSON) | {"model": f"{provider}/{JSON}"}
        whole = litellm.completion(messages=messages, response_format=Request, **asked)
        Request.model_validate_json(whole.choices[0].message.content)


def tools(url: str) -> None:
    messages = [{"role": "user", "content": "What is the weather in Porto?"}]
    asked = settings(url, TOOLS) | {"tools": [TOOL], "tool_choice": "required"}
    whole = litellm.completion(messages=messages, **asked)
    check(whole.choices[0].finish_reason == "tool_calls", "finish_reason")
    calls = whole.choices[0].message.tool_calls
    for call in calls:
        check_weather(json.loads(call.function.arguments), "arguments")
    chunks = [*litellm.completion(messages=messages, stream=True, **asked)]
    joined = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    said = [call.function.arguments for call in calls]
    check([call.function.arguments for call in joined] == said, "streamed arguments")


def responses(url: str) -> None:
    answer = litellm.responses(
        model=f"openai/{JSON}",
        input=MESSAGE,
        api_base=f"{url}/v1",
        api_key=KEY,
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    )
    check(answer.status in ("completed", "incomplete"), f"responses: {answer.status}")


if __name__ == "__main__":
    run(schema, tools, responses)
