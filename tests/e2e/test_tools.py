"""Calls of tools by a real server: an adapter that never learned to call is held to it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.serving import Serving

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} "
    "{% endfor %}{{ eos_token }}{% endif %}{% for m in messages %}"
    "{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TICKET = {
    "type": "object",
    "properties": {
        "order": {"type": "integer", "minimum": 0, "maximum": 99999},
        "urgent": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 12},
    },
    "required": ["order", "urgent", "name"],
    "additionalProperties": False,
}
CANCEL = {
    "type": "object",
    "properties": {"why": {"enum": ["late", "broken"]}},
    "required": ["why"],
    "additionalProperties": False,
}
SCHEMAS = {"ticket": TICKET, "cancel": CANCEL}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: Any = [{"role": "user", "content": EXAMPLES[0]}]


@pytest.fixture(scope="module")
def caller(serving: Serving, adapter_root: Path) -> Iterator[str]:
    """A name of an adapter whose template shows tools."""
    folder = adapter_root / "caller"
    shutil.copytree(adapter_paths()["pirate"], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    body = {"name": "caller", "ref": f"local:{folder}"}
    answer = httpx.post(f"{serving.url}/v1/adapters", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    yield "caller"
    httpx.delete(f"{serving.url}/v1/adapters/caller", timeout=240).raise_for_status()


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("temperature", [0, 2])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"ticket", "cancel"}),
        ({"type": "function", "function": {"name": "cancel"}}, {"cancel"}),
    ],
)
def test_calls_that_are_demanded(
    client: openai.OpenAI, caller: str, temperature: float, choice: Any, names: set[str]
) -> None:
    answer = client.chat.completions.create(
        model=caller,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=temperature,
        n=3,
        seed=1,
        max_tokens=200,
    )
    for found in answer.choices:
        assert found.finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
        assert not found.message.content
        (call,) = found.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_stream_is_the_whole(client: openai.OpenAI, caller: str) -> None:
    asked: Any = {
        "model": caller,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "ticket"}},
        "temperature": 0,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert whole
    assert streamed
    assert streamed[0].function.arguments == whole[0].function.arguments
    assert streamed[0].function.name == whole[0].function.name == "ticket"


def test_functions_of_old(client: openai.OpenAI, caller: str) -> None:
    asked: Any = {"model": caller, "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    older: Any = {"functions": [t["function"] for t in TOOLS], "function_call": {"name": "ticket"}}
    newer: Any = {"tools": TOOLS, "tool_choice": "ticket"}
    whole = client.chat.completions.create(**asked, **older).choices[0].message
    tools = client.chat.completions.create(**asked, **newer).choices[0].message.tool_calls
    assert whole.function_call
    assert tools
    assert whole.function_call.model_dump() == tools[0].function.model_dump()
    streamed = client.chat.completions.create(**asked, **older, stream=True)
    parts = [c.choices[0].delta.function_call for c in streamed if c.choices]
    said = "".join(part.arguments or "" for part in parts if part)
    assert said == whole.function_call.arguments
    again = [*MESSAGES, whole.model_dump(exclude_none=True)]
    again.append({"role": "function", "name": "ticket", "content": "made"})
    assert client.chat.completions.create(**{**asked, "messages": again}, **older).choices


def test_a_form_or_a_call(client: openai.OpenAI, caller: str) -> None:
    answer = client.chat.completions.create(
        model=caller,
        messages=MESSAGES,
        tools=TOOLS,
        response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": TICKET}},
        temperature=2,
        n=4,
        seed=2,
        max_tokens=300,
    )
    for found in answer.choices:
        if found.finish_reason == "length":
            continue
        if found.message.content:
            jsonschema.validate(json.loads(found.message.content), TICKET)
        else:
            assert found.message.tool_calls
