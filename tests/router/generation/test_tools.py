"""Tools and reasoning over HTTP: a scripted answer comes as calls, whole and streamed."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher

from loraplex.adapters.manifest import AdapterManifest
from loraplex.server.protocol import AdapterLoad, GenerateRequest, ThinkingBudget
from tests.router.fake_worker import (
    EOS,
    FakeWorker,
    ids_of,
    make_card,
    make_manifest,
    running_worker,
)
from tests.router.serving import Running, running_router

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nWhich place?\n</think>\n\n"
ANSWER = f"{THOUGHT}I look.\n{CALL}\n{CALL}"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
HI: Any = [{"role": "user", "content": "hi"}]


def strict(place: dict[str, Any]) -> dict[str, Any]:
    """The tool, held to a schema of its argument."""
    parameters = {
        "type": "object",
        "properties": {"place": {"type": "string", **place}},
        "required": ["place"],
        "additionalProperties": False,
    }
    function = WEATHER["function"] | {"parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


class Scripted:
    """A router whose model always says `answer`."""

    def __init__(self, router: Running, worker: FakeWorker) -> None:
        self.router = router
        self.worker = worker
        self.client = openai.AsyncOpenAI(
            base_url=f"{router.client.base_url}/v1", api_key="none", max_retries=0
        )

    @property
    def prompt(self) -> str:
        """The last one that the worker got."""
        requests = [f for f in self.worker.frames if isinstance(f, GenerateRequest)]
        return bytes(requests[-1].prompt_ids).decode()

    async def ask(self, **fields: Any) -> Any:
        body = {"model": "", "messages": HI, "tools": [WEATHER]} | fields
        return await self.router.client.post("/v1/chat/completions", json=body)


@asynccontextmanager
async def scripted(
    tmp_path: Path, answer: str = ANSWER, template: str = TEMPLATE, **options: Any
) -> AsyncIterator[Scripted]:
    worker = FakeWorker(make_card(chat_template=template, max_context=2048))
    worker.script = lambda request: [*ids_of(answer), EOS]
    async with running_worker(worker), running_router(tmp_path, worker, **options) as router:
        model = Scripted(router, worker)
        async with model.client:
            yield model


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with scripted(tmp_path) as running:
        yield running


async def test_a_whole_answer(model: Scripted) -> None:
    answer = await model.client.chat.completions.create(model="", messages=HI, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.to_dict()["reasoning"] == "Which place?"
    assert choice.message.to_dict()["reasoning_content"] == "Which place?"
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == ["weather", "weather"]  # type: ignore[union-attr]
    told = [json.loads(call.function.arguments) for call in calls]  # type: ignore[union-attr]
    assert told == [{"place": "Köln"}] * 2
    assert len({call.id for call in calls}) == 2
    assert '"name": "weather"' in model.prompt
    assert num_reasoning(answer) == len(THOUGHT)


def num_reasoning(answer: Any) -> int:
    """A token is a byte here."""
    count: int = answer.usage.completion_tokens_details.reasoning_tokens
    return count


async def test_tokens_of_reasoning(tmp_path: Path) -> None:
    """In a stream with the last chunk alone, or so far."""
    options: Any = {"stream": True, "model": "", "messages": HI}
    async with scripted(tmp_path, f"{THOUGHT}Köln") as model:
        create = model.client.chat.completions.create
        stream = await create(stream_options={"include_usage": True}, **options)
        *_, last = [chunk async for chunk in stream]
        assert num_reasoning(last) == len(THOUGHT)
        each: Any = {"include_usage": True, "continuous_usage_stats": True}
        so_far = [num_reasoning(c) async for c in await create(stream_options=each, **options)]
        assert so_far[0] == 0
        assert so_far == sorted(so_far)
        assert so_far[-1] == len(THOUGHT)
        cut = await create(model="", messages=HI, max_tokens=12)
        assert num_reasoning(cut) == 12
        hidden = await model.ask(include_reasoning=False)
        assert hidden.json()["usage"]["completion_tokens_details"] == {
            "reasoning_tokens": len(THOUGHT)
        }
        text = await model.ask(separate_reasoning=False)
        assert text.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    async with scripted(tmp_path, "<thin ice>") as model:
        assert (await model.ask()).json()["usage"]["completion_tokens_details"] == {
            "reasoning_tokens": 0
        }


async def test_a_stream(model: Scripted) -> None:
    """The SDK's own helper joins what comes."""
    chunks = []
    asked = model.client.chat.completions.stream(model="", messages=HI, tools=[WEATHER])
    async with asked as stream:
        async for event in stream:
            if event.type == "chunk":
                chunks.append(event.chunk)
        whole = await stream.get_final_completion()
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls or []
    assert [json.loads(c.function.arguments) for c in calls] == [{"place": "Köln"}] * 2
    parts: list[Any] = [p for c in chunks for o in c.choices for p in o.delta.tool_calls or []]
    for index in range(2):
        first, *rest = [part for part in parts if part.index == index]
        assert first.id
        assert (first.type, first.function.name) == ("function", "weather")
        assert len(rest) > 2
        assert all(p.id is None and p.function.name is None for p in rest)
    reasoning = [o.delta.to_dict()["reasoning"] or "" for c in chunks for o in c.choices]
    assert "".join(map(str, reasoning)) == "Which place?"


async def test_calls_and_results_in_history(model: Scripted) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather"}}
    call["function"] |= {"arguments": '{"place": "Köln"}'}  # type: ignore[operator]
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    assert (await model.ask(messages=[*HI, said, told])).status_code == 200
    assert '<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}' in model.prompt
    assert "<tool>rain<assistant>" in model.prompt


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}, {"tools": None}])
async def test_without_tools_all_is_text(model: Scripted, fields: dict[str, Any]) -> None:
    choice = (await model.ask(**fields)).json()["choices"][0]
    assert choice["message"]["content"] == f"I look.\n{CALL}\n{CALL}"
    assert choice["finish_reason"] == "stop"
    assert "weather" not in model.prompt


async def test_what_names_no_tool_is_text(model: Scripted) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    choice = (await model.ask(tools=[other])).json()["choices"][0]
    assert CALL in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "reasoning", "begins"),
    [
        ({"include_reasoning": False}, None, "I look."),
        ({"separate_reasoning": False}, None, "<think>\nWhich place?"),
        ({"stream_reasoning": False}, "Which place?", "I look."),
    ],
)
async def test_what_becomes_of_reasoning(
    model: Scripted, fields: dict[str, Any], reasoning: str | None, begins: str
) -> None:
    message = (await model.ask(**fields)).json()["choices"][0]["message"]
    assert message.get("reasoning") == reasoning
    assert message["content"].startswith(begins)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"reasoning_effort": "none"}, True),
        ({"enable_thinking": False}, True),
        ({"thinking": {"type": "disabled"}}, True),
        ({"reasoning": {"enabled": False}}, True),
        ({"reasoning": {"effort": "none"}}, True),
        ({"thinking": {"type": "enabled"}}, False),
        ({}, False),
    ],
)
async def test_reasoning_is_turned_off(model: Scripted, fields: dict[str, Any], says: bool) -> None:
    assert (await model.ask(**fields)).status_code == 200
    assert model.prompt.endswith("<think></think>") is says


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
async def test_what_the_template_refuses(
    model: Scripted, fields: dict[str, Any], param: str
) -> None:
    answer = await model.ask(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# Reads no tools, and no system's message either.
DEAF = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
MUTE = "{{ tools }}{{ messages[0].content }}"


async def test_a_template_that_reads_no_tools(tmp_path: Path) -> None:
    """A default text describes them; calls come in the form that it asks for."""
    async with scripted(tmp_path, template=DEAF, tool_format="mistral") as model:
        message = (await model.ask()).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"] * 2
        assert model.prompt.startswith("<user># Tools\n\n")
        assert model.prompt.endswith("hi")
        back = [*HI, {"role": "assistant"} | message]
        back += [
            {"role": "tool", "content": "wet", "tool_call_id": call["id"]}
            for call in message["tool_calls"]
        ]
        assert (await model.ask(messages=back)).status_code == 200
        called = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'
        assert model.prompt.count(called) == 2
        assert model.prompt.count("<tool_response>\nwet\n</tool_response>") == 2
        assert (await model.ask(messages=back, tool_choice="none")).status_code == 200
        assert model.prompt.startswith("<user>hi<assistant>")
        assert "I look.\n<tool_call>" in model.prompt
        one = await model.ask(parallel_tool_calls=False)
        assert one.status_code == 200
        check_held(model)


async def test_calls_of_an_unknown_form(tmp_path: Path) -> None:
    """They are refused, unless a grammar says what a call is."""
    async with scripted(tmp_path, template=MUTE) as model:
        answer = await model.ask()
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "--tool-format" in answer.json()["error"]["message"]
        await is_demanded(model)


async def is_demanded(model: Scripted) -> None:
    """Each way to demand a call is served, and held to the form of calls."""
    named = {"type": "function", "function": {"name": "weather"}}
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tools": [strict({})]}):
        answer = await model.ask(**fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["tool_calls"]
        check_held(model)


def check_held(model: Scripted) -> None:
    """The last answer keeps to calls of the default text's form."""
    grammar = model.worker.requests[-1].sampling.grammar
    assert not LLMatcher.validate_grammar(grammar)
    assert "<tool_call>" in grammar
    assert "weather" in grammar


@pytest.mark.parametrize(
    ("template", "unbound"),
    [
        ("{{ messages[0].content }}", "reasoning_effort, verbosity"),
        ("{{ reasoning_effort }}{{ verbosity }}{{ messages[0].content }}", None),
    ],
)
async def test_hints_that_no_template_reads(
    tmp_path: Path, template: str, unbound: str | None
) -> None:
    async with scripted(tmp_path, "Yes.", template) as model:
        answer = await model.ask(tools=None, reasoning_effort="low", verbosity="high")
        assert answer.status_code == 200
        assert answer.headers.get("x-loraplex-unbound") == unbound


@pytest.mark.parametrize(
    ("template", "unbound"),
    [
        (DEAF, "thinking, thinking.budget_tokens, output_config.effort"),
        (DEAF + "{# </think> #}<think>", "output_config.effort"),
        (DEAF + "{{ enable_thinking }}{{ thinking_budget }}{{ reasoning_effort }}", None),
    ],
)
async def test_thinking_as_anthropic_asks_for_it(
    tmp_path: Path, template: str, unbound: str | None
) -> None:
    body = {"model": "", "messages": HI, "max_tokens": 9, "output_config": {"effort": "low"}}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    async with scripted(tmp_path, "Yes.</think>Yes", template) as model:
        answer = await model.router.client.post("/v1/messages", json=body)
        assert answer.status_code == 200
        found = answer.headers.get("x-loraplex-unbound")
        assert sorted((found or "").split(", ")) == sorted((unbound or "").split(", "))


@pytest.mark.parametrize(
    ("end", "asked", "expected"),
    [
        ("", {}, None),
        ("", {"thinking_token_budget": -1}, None),
        ("", {"thinking_token_budget": 5}, (5, "<think>")),
        ("<think>\n", {"thinking_token_budget": 0}, (0, "")),
        ("<think></think>\n", {"thinking_token_budget": 5}, None),
    ],
)
async def test_a_budget_of_reasoning(
    tmp_path: Path, end: str, asked: dict[str, Any], expected: tuple[int, str] | None
) -> None:
    async with scripted(tmp_path, f"{THOUGHT}Yes.", TEMPLATE + end) as model:
        answer = await model.ask(tools=None, **asked)
        assert answer.status_code == 200, answer.text
        sent = model.worker.requests[-1].sampling.thinking
        if expected is None:
            assert sent is None
        else:
            tokens, opens = expected
            marks = tuple(ids_of(opens)), tuple(ids_of("</think>"))
            assert sent == ThinkingBudget(tokens, *marks)


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        ("{{ messages[0].content }}", {"thinking_token_budget": 5}),
        (TEMPLATE, {"thinking_token_budget": 5, "separate_reasoning": False}),
        (TEMPLATE, {"thinking_token_budget": -2}),
    ],
)
async def test_a_budget_that_cannot_be_held_to(
    tmp_path: Path, template: str, asked: dict[str, Any]
) -> None:
    async with scripted(tmp_path, "Yes.", template) as model:
        answer = await model.ask(tools=None, **asked)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "thinking_token_budget"


async def test_formats_by_option(tmp_path: Path) -> None:
    template = "{{ tools }}{{ messages[0].content }}"
    options = {"tool_format": "hermes", "reasoning_format": "think"}
    async with scripted(tmp_path, template=template, **options) as model:
        message = (await model.ask()).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("I look.", "Which place?")
        assert len(message["tool_calls"]) == 2


async def test_reasoning_that_the_prompt_begins(tmp_path: Path) -> None:
    template = TEMPLATE + "<think>\n"
    async with scripted(tmp_path, "So.\n</think>\nYes.", template) as model:
        message = (await model.ask()).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("Yes.", "So.")
        assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": [strict({"pattern": "(?=a)b"})]},
            "tools[0].function.parameters.properties.place.pattern",
        ),
        (
            {"tools": None, "functions": [strict({"pattern": "(?=a)b"})["function"]]},
            "functions[0].parameters.properties.place.pattern",
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "custom": {
                            "name": "say",
                            "format": {
                                "type": "grammar",
                                "grammar": {"syntax": "regex", "definition": "(?=a)b"},
                            },
                        },
                    }
                ]
            },
            "tools[0].custom.format",
        ),
    ],
)
async def test_calls_that_cannot_be_held(
    model: Scripted, fields: dict[str, Any], param: str
) -> None:
    answer = await model.ask(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "is_held"),
    [
        ({}, False),
        ({"tools": [strict({})]}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tool_choice": "none"}, False),
    ],
)
async def test_the_worker_gets_a_grammar(
    model: Scripted, fields: dict[str, Any], is_held: bool
) -> None:
    answer = await model.ask(**fields)
    assert answer.status_code == 200, answer.text
    grammar = model.worker.requests[-1].sampling.grammar
    assert bool(grammar) is is_held
    if is_held:
        assert not LLMatcher.validate_grammar(grammar)
        assert "weather" in grammar
        assert "<think>" in grammar


async def test_formats_by_registration(tmp_path: Path) -> None:
    template = "{{ tools }}{{ messages[0].content }}"
    async with scripted(tmp_path, template=template) as model:

        async def register(**fields: Any) -> Any:
            body = {"name": "mine", "ref": "hub:org/one@main"} | fields
            return await model.router.client.post("/v1/adapters", json=body)

        assert (await register()).json()["tool_format"] is None
        assert (await model.ask(model="mine")).status_code == 400
        for fields in ({"tool_format": "hermes"}, {}):
            assert (await register(**fields)).json()["tool_format"] == "hermes"
            message = (await model.ask(model="mine")).json()["choices"][0]["message"]
            assert len(message["tool_calls"]) == 2
        assert (await model.ask(model="org/one")).status_code == 400
        assert (await register(tool_format="auto")).json()["tool_format"] is None
        assert (await model.ask(model="mine")).status_code == 400
        refused = await register(tool_format="unheard-of")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_format")


async def test_an_adapters_own_template_comes_before_the_option(tmp_path: Path) -> None:
    async def own_template(load: AdapterLoad) -> AdapterManifest:
        template = TEMPLATE.replace("think>", "reasoning>")
        return make_manifest("org/own", chat_template=template)

    async with scripted(tmp_path, reasoning_format="seed", tool_format="hermes") as model:
        model.worker.loader = own_template
        model.worker.script = lambda request: [*ids_of("<reasoning>So.</reasoning>Yes."), EOS]
        message = (await model.ask(model="org/own")).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("Yes.", "So.")
        message = (await model.ask()).json()["choices"][0]["message"]
        assert message["content"] == "<reasoning>So.</reasoning>Yes."


UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


async def test_what_a_schema_cannot_bind(tmp_path: Path) -> None:
    """A strict tool is refused for it; another is held to the rest, and a header says so."""
    parameters: Any = {"type": "object", "properties": {"ids": UNIQUE}, "required": ["ids"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    place = "tools[0].function.parameters.properties.ids.uniqueItems"
    async with scripted(tmp_path) as model:
        answer = await model.ask(tools=[tool], tool_choice="required")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-loraplex-unbound"] == place
        tool["function"]["strict"] = True
        answer = await model.ask(tools=[tool], tool_choice="required")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, place)
