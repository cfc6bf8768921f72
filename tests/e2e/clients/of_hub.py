"""huggingface_hub's InferenceClient, and the clients of TGI and LoRAX: tools, schemas, grammars."""

import json
from typing import Any

import lorax
import text_generation
from huggingface_hub import InferenceClient
from text_generation.types import Grammar

from tests.e2e.clients.asking import (
    JSON,
    MAX_TOKENS,
    MESSAGE,
    SCHEMA,
    TOOL,
    TOOLS,
    Request,
    check,
    check_weather,
    run,
)

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Porto?"}]
WANTED: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}


def response_format(url: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "request", "schema": SCHEMA}}
    whole = InferenceClient(base_url=url).chat_completion(
        [{"role": "user", "content": MESSAGE}], model=JSON, response_format=form, **WANTED
    )
    Request.model_validate_json(whole.choices[0].message.content)


def tools(url: str) -> None:
    hub: Any = InferenceClient(base_url=url)
    asked = {"model": TOOLS, "tools": [TOOL], "tool_choice": "required", **WANTED}
    whole = hub.chat_completion(QUESTION, **asked)
    function = whole.choices[0].message.tool_calls[0].function
    check(function.name == "weather", f"call: {function}")
    check_weather(json.loads(function.arguments), "arguments")
    deltas = [
        call.function.arguments or ""
        for part in hub.chat_completion(QUESTION, stream=True, **asked)
        for call in (part.choices[0].delta.tool_calls or [])
        if call["index"] == 0
    ]
    check("".join(deltas) == function.arguments, f"streamed arguments: {deltas}")


def grammar(url: str) -> None:
    form: Any = {"type": "json", "value": SCHEMA}
    hub: Any = InferenceClient(url)
    for model in (None, JSON):
        asked: dict[str, Any] = {"adapter_id": model, "max_new_tokens": MAX_TOKENS}
        whole = hub.text_generation(MESSAGE, grammar=form, details=True, **asked)
        Request.model_validate_json(whole.generated_text)
        check(whole.details.finish_reason == "eos_token", "finish_reason")
        parts = hub.text_generation(MESSAGE, grammar=form, stream=True, **asked)
        check("".join(parts).strip() == whole.generated_text.strip(), "stream")


def text_generation_client(url: str) -> None:
    client = text_generation.Client(url)
    form = Grammar(type="json", value=SCHEMA)
    answer = client.generate(MESSAGE, grammar=form, max_new_tokens=MAX_TOKENS)
    Request.model_validate_json(answer.generated_text)
    form = Grammar(type="regex", value="[a-c]{3}")
    check(len(client.generate(MESSAGE, grammar=form).generated_text) == 3, "regex")


def lorax_client(url: str) -> None:
    client = lorax.Client(url)
    form = {"type": "json_object", "schema": SCHEMA}
    asked: dict[str, Any] = {"adapter_id": JSON, "max_new_tokens": MAX_TOKENS}
    whole = client.generate(MESSAGE, response_format=form, **asked)
    Request.model_validate_json(whole.generated_text)
    drawn = client.generate(MESSAGE, response_format=form, temperature=1.5, seed=4, **asked)
    Request.model_validate_json(drawn.generated_text)
    events = [*client.generate_stream(MESSAGE, response_format=form, **asked)]
    check(events[-1].generated_text == whole.generated_text, "LoRAX's stream")


if __name__ == "__main__":
    run(response_format, tools, grammar, text_generation_client, lorax_client)
