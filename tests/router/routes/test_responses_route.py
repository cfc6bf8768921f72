"""`/v1/responses` over HTTP, by the published SDK."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel

from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import BASE_NAME, EOS, FakeWorker, ids_of
from tests.router.generation.test_tools import THOUGHT, WEATHER, scripted
from tests.router.serving import Running

CALLED = '<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}</tool_call>'


class Form(BaseModel):
    a: int


@pytest.fixture
async def sdk(router: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{router.client.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


async def test_text(sdk: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    answer = await sdk.responses.create(
        model=BASE_NAME, instructions="Be kind", input="ab", temperature=0, metadata={"a": "b"}
    )
    assert answer.output_text == "base says hello 0"
    assert (answer.status, answer.metadata) == ("completed", {"a": "b"})
    rendered = "<system>Be kind<user>ab<assistant>"
    assert worker.requests[-1].prompt_ids == ids_of(rendered)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(rendered)
    assert answer.usage.output_tokens == len("base says hello 0") + 1


async def test_an_answer_goes_back_as_input(sdk: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    first = await sdk.responses.create(model=BASE_NAME, input="ab", max_output_tokens=4)
    assert first.status == "incomplete"
    history = [item.model_dump(exclude_unset=True) for item in first.output]
    turns: Any = [{"role": "user", "content": "ab"}, *history, {"role": "user", "content": "cd"}]
    await sdk.responses.create(model=BASE_NAME, input=turns)
    rendered = "<user>ab<assistant>base<user>cd<assistant>"
    assert worker.requests[-1].prompt_ids == ids_of(rendered)


async def test_streams(sdk: openai.AsyncOpenAI) -> None:
    events = [
        event async for event in await sdk.responses.create(model="org/a", input="ab", stream=True)
    ]
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "".join(pieces)
    async with sdk.responses.stream(model="org/a", input="ab") as stream:
        kinds = {event.type async for event in stream}
        whole = await stream.get_final_response()
    assert whole.output_text == last.response.output_text
    assert {"response.created", "response.output_item.done", "response.completed"} <= kinds


async def test_an_answer_that_breaks_off(sdk: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    async def fail(_: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return "internal" if index == 2 else None

    worker.script = lambda _: [*ids_of("hello"), EOS]
    worker.before_token = fail
    stream = await sdk.responses.create(model=BASE_NAME, input="ab", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.output_text == "he"


async def test_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as hidden:
        await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
    assert (hidden.value.param, hidden.value.code) == ("background", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        await sdk.responses.create(model=BASE_NAME, input="ab", max_output_tokens=5000)
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.responses.create(model="org/missing", input="ab", stream=True)
    assert missing.value.param == "model"


FLAT: Any = {"type": "function", "strict": False, **WEATHER["function"]}


async def test_tools_and_reasoning(tmp_path: Path) -> None:
    """Calls go back with their results; the stream has the same items as the whole answer."""
    async with scripted(tmp_path) as model:
        ask = model.client.responses
        whole = await ask.create(model="", input="hi", tools=[FLAT])
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert whole.output_text == "I look."
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens == len(THOUGHT)
        calls = [item for item in whole.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"place": "Köln"}] * 2
        async with ask.stream(model="", input="hi", tools=[FLAT]) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        assert [item.type for item in streamed.output] == kinds
        assert streamed.output_text == whole.output_text
        assert streamed.usage == whole.usage
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            for call in calls
        ]
        history = [item.model_dump(exclude_unset=True) for item in whole.output]
        told: Any = [{"role": "user", "content": "hi"}, *history, *results]
        await ask.create(model="", input=told)
        expected = "<user>hi<assistant>I look." + CALLED * 2 + "<tool>rain<tool>rain<assistant>"
        assert model.prompt == expected
        hints: Any = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
        hinted = await ask.with_raw_response.create(model="", input="hi", **hints)
        unbound = hinted.headers["x-loraplex-unbound"]
        assert unbound == "reasoning.effort, text.verbosity"


async def test_form_of_the_text(sdk: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    worker.script = lambda _: [*ids_of('{"a": 1}'), EOS]
    whole = await sdk.responses.parse(model="org/a", input="ab", text_format=Form)
    assert whole.output_parsed == Form(a=1)
    held = worker.requests[-1].sampling.grammar
    assert not LLMatcher.validate_grammar(held)
    assert r'"\"a\""' in held
    async with sdk.responses.stream(model="org/a", input="ab", text_format=Form) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_response()
    assert streamed.output_parsed == whole.output_parsed
    assert worker.requests[-1].sampling.grammar == held
    bad: Any = {"type": "json_schema", "name": "a", "schema": {"type": "robot"}}
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="org/a", input="ab", text={"format": bad})
    assert (refused.value.param or "").startswith("text.format.schema")
