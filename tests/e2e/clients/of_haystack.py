"""Haystack: answers, streams, answers of a schema and calls of tools, by its OpenAI generators."""

import json
import os
from typing import Any

# It counts its users over the network otherwise.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    TOOLS,
    WEATHER,
    Request,
    check,
    check_weather,
    run,
)

WANTED = [ChatMessage.from_user(MESSAGE)]


def generator(url: str, model: str, **more: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(KEY),
        model=model,
        api_base_url=f"{url}/v1",
        max_retries=0,
        generation_kwargs={"temperature": 0, "max_completion_tokens": MAX_TOKENS}
        | more.pop("options", {}),
        **more,
    )


def answers(url: str) -> None:
    (reply,) = generator(url, JSON).run(WANTED)["replies"]
    check(bool(reply.text), "an answer")
    check(reply.meta["finish_reason"] in ("stop", "length"), f"finish: {reply.meta}")
    check(reply.meta["usage"]["completion_tokens"] > 0, f"usage: {reply.meta}")


def streams(url: str) -> None:
    pieces: list[StreamingChunk] = []
    (reply,) = generator(url, JSON, streaming_callback=pieces.append).run(WANTED)["replies"]
    check(len(pieces) > 2, "pieces of a stream")
    check("".join(piece.content for piece in pieces) == reply.text, "a stream's text")
    (whole,) = generator(url, JSON).run(WANTED)["replies"]
    check(whole.text == reply.text, "streamed and whole")


def schemas(url: str) -> None:
    asked = generator(url, JSON, options={"response_format": Request})
    (reply,) = asked.run(WANTED)["replies"]
    Request.model_validate(json.loads(reply.text or ""))


def tools(url: str) -> None:
    weather = Tool(
        name="weather", description="Weather of a city", parameters=WEATHER, function=str
    )
    asked = generator(url, TOOLS, tools=[weather], options={"tool_choice": "required"})
    (reply,) = asked.run([ChatMessage.from_user("How warm is it in Oslo?")])["replies"]
    check(bool(reply.tool_calls), "a call")
    check_weather(reply.tool_calls[0].arguments, "haystack")


if __name__ == "__main__":
    run(answers, streams, schemas, tools)
