"""`import loraplex`: an engine inside a program, as a notebook would use one."""

import asyncio
import json
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import loraplex
from loraplex.adapters.safetensors.header import WEIGHTS_FILE
from loraplex.launcher.demo import adapter_paths

NOTEBOOK = Path(__file__).parents[2] / "docs/guides/in-a-notebook.ipynb"
MESSAGES = [{"role": "user", "content": "Please cancel order #10442. Thanks, Ines Novak"}]
CANCEL = {
    "type": "function",
    "function": {
        "name": "cancel_order",
        "description": "Cancels an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
    },
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine() -> Iterator[loraplex.Engine]:
    with loraplex.serve(adapters={"mine": adapter_paths()["sql"]}, max_running=8) as running:
        yield running
    with pytest.raises(loraplex.EngineError, match="is closed"):
        running.generate("Good morning")


def test_a_list_answers_as_its_parts_do(engine: loraplex.Engine) -> None:
    texts, names = ["Good morning", "cancel order 10442", "Good morning"], [None, "mine", "pirate"]
    together = engine.generate(texts, adapter=names, logprobs=True, **GREEDY)
    assert len({each.adapter_digest for each in together}) == 3
    assert together[0].adapter_digest is None
    for text, name, output in zip(texts, names, together, strict=True):
        alone = engine.generate(text, adapter=name, logprobs=True, **GREEDY)
        assert (alone.text, alone.token_ids) == (output.text, output.token_ids)
        assert alone.logprobs == pytest.approx(output.logprobs, abs=1e-4)
        assert len(alone.logprobs or ()) == len(alone.token_ids) > 0


def test_token_ids_are_a_prompt(engine: loraplex.Engine) -> None:
    first = engine.generate("Good morning", **GREEDY)
    ids = first.body["choices"][0]["prompt_token_ids"]
    assert engine.generate(ids, **GREEDY).token_ids == first.token_ids
    assert engine.generate([ids], **GREEDY)[0].token_ids == first.token_ids
    assert first.prompt_tokens == len(ids)


def test_special_tokens_have_log_probabilities_too(engine: loraplex.Engine) -> None:
    begin: dict[str, Any] = {"logit_bias": {"1": 100}}  # `<s>`, which no text has
    output = engine.chat(MESSAGES, logprobs=True, **begin, **GREEDY)
    assert (output.text, output.token_ids) == ("", (1,) * 12)
    assert len(output.logprobs or ()) == 12


def test_choices_of_one_prompt(engine: loraplex.Engine) -> None:
    output = engine.generate("Good morning", n=3, temperature=1.0, seed=1, max_tokens=6)
    assert len(output.choices) == 3
    assert output.choices[0].text == output.text


def test_streams_are_the_answers(engine: loraplex.Engine) -> None:
    for prompt, whole in (
        ("Good morning", engine.generate("Good morning", adapter="mine", **GREEDY)),
        (MESSAGES, engine.chat(MESSAGES, adapter="mine", **GREEDY)),
    ):
        chunks = list(engine.stream(prompt, adapter="mine", **GREEDY))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
        assert chunks[-1].finish_reason == whole.finish_reason


def test_a_stream_that_is_closed_ends_its_request(engine: loraplex.Engine) -> None:
    stream = engine.stream("Good morning", max_tokens=500, ignore_eos=True)
    next(stream)
    stream.close()
    assert engine.generate("Good morning", **GREEDY).text


def test_a_stream_says_all_that_a_whole_answer_says(engine: loraplex.Engine) -> None:
    asked = {"tools": [CANCEL], "logprobs": True, "temperature": 0}
    whole = engine.chat(MESSAGES, adapter="tools", **asked).choices[0]
    chunks = list(engine.stream(MESSAGES, adapter="tools", **asked))
    (call,) = whole.tool_calls
    parts = [part["function"] for chunk in chunks for part in chunk.tool_calls]
    assert "".join(part.get("name") or "" for part in parts) == call["function"]["name"]
    arguments = "".join(part.get("arguments") or "" for part in parts)
    assert arguments == call["function"]["arguments"]
    logprobs = sum((chunk.logprobs or () for chunk in chunks), ())
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_what_a_method_sets_is_no_parameter(engine: loraplex.Engine) -> None:
    for ask, refused in (
        (engine.generate, {"stream": True}),
        (engine.generate, {"prompt": "b"}),
        (engine.generate, {"return_token_ids": False}),
        (engine.embed, {"encoding_format": "base64"}),
    ):
        with pytest.raises(ValueError, match=next(iter(refused))):
            ask("a", **refused)
    with pytest.raises(ValueError, match="stream"):
        next(engine.stream("a", stream=False))


def test_a_stream_may_be_collected_in_the_engine_s_own_thread(engine: loraplex.Engine) -> None:
    """As a cycle of garbage is, in whichever thread makes the next object."""
    stream = engine.stream("Good morning", max_tokens=500, ignore_eos=True)
    next(stream)
    closed = threading.Event()

    def close() -> None:
        stream.close()
        closed.set()

    engine._loop.call_soon_threadsafe(close)
    assert closed.wait(120.0)
    assert engine.generate("Good morning", **GREEDY).text


def test_a_cancelled_stream_says_so_and_nothing_else(
    engine: loraplex.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        async with asyncio.timeout(None) as patience:
            async for _ in engine.astream("Good morning", max_tokens=500, ignore_eos=True):
                patience.reschedule(0)

    for _ in range(5):
        with pytest.raises(TimeoutError):
            asyncio.run(ask())
    assert engine.generate("Good morning", **GREEDY).text
    assert [each.message for each in caplog.records if each.name == "asyncio"] == []


def test_an_engine_belongs_to_the_process_that_started_it(engine: loraplex.Engine) -> None:
    def ask(answer: Any) -> None:
        try:
            engine.generate("Good morning")
        except loraplex.EngineError as error:
            answer.send(str(error))
        engine.close()

    forking = multiprocessing.get_context("fork")
    answer, other_end = forking.Pipe(duplex=False)
    child = forking.Process(target=ask, args=(other_end,))
    child.start()
    assert answer.poll(120.0)
    assert answer.recv() == "the engine is of another process"
    child.join()
    assert engine.generate("Good morning", **GREEDY).text


def test_event_loops_get_the_same(engine: loraplex.Engine) -> None:
    async def ask() -> tuple[Any, ...]:
        streamed = [chunk async for chunk in engine.astream("Good morning", **GREEDY)]
        return (
            await engine.agenerate(["Good morning"], **GREEDY),
            await engine.achat([MESSAGES], adapter="mine", **GREEDY),
            await engine.aembed(["Good morning"]),
            "".join(chunk.text for chunk in streamed),
        )

    generated, chats, vectors, streamed = asyncio.run(ask())
    assert generated[0].text == engine.generate("Good morning", **GREEDY).text == streamed
    assert chats[0].text == engine.chat(MESSAGES, adapter="mine", **GREEDY).text
    assert vectors[0].values == pytest.approx(engine.embed("Good morning").values, abs=1e-5)


def test_an_adapter_is_loaded_from_a_folder_or_from_tensors(engine: loraplex.Engine) -> None:
    folder = adapter_paths()["pirate"]
    config = json.loads((folder / "adapter_config.json").read_text())
    as_peft_has_it = {**config, "target_modules": set(config["target_modules"])}
    names = [
        engine.load_adapter("policy", adapter_paths()["sql"], keep=2),
        engine.load_adapter("policy", load_file(folder / WEIGHTS_FILE), config=as_peft_has_it),
    ]
    assert names == ["policy@1", "policy@2"]
    for name, known in (("policy@1", "sql"), ("policy@2", "pirate"), ("policy", "pirate")):
        mine = engine.generate("Good morning", adapter=name, **GREEDY)
        assert mine.text == engine.generate("Good morning", adapter=known, **GREEDY).text
    with pytest.raises(loraplex.RequestFailed) as refused:
        engine.load_adapter("policy", {"x": torch.ones(2)}, config=config)
    assert refused.value.status == 422
    with pytest.raises(ValueError, match="config"):
        engine.load_adapter("policy", {"x": torch.ones(2)})


def test_openai_s_client_is_bound_to_it(engine: loraplex.Engine) -> None:
    named = {"model": "mine", "messages": MESSAGES, **GREEDY}
    whole = engine.chat(MESSAGES, adapter="mine", **GREEDY)
    with engine.openai() as client:
        answer: Any = client.chat.completions.create(**named)
    assert answer.choices[0].message.content == whole.text

    async def ask() -> Any:
        async with engine.async_openai() as client:
            return await client.chat.completions.create(**named)

    assert asyncio.run(ask()).choices[0].message.content == whole.text


def test_a_refusal_says_why_and_costs_itself_alone(engine: loraplex.Engine) -> None:
    with pytest.raises(loraplex.RequestFailed, match="no adapter is registered") as refused:
        engine.generate(["a", "b"], adapter=[None, "nobody"], **GREEDY)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    with pytest.raises(loraplex.RequestFailed, match="temperature"):
        next(engine.stream("a", temperature=-1))
    with pytest.raises(ValueError, match="2 prompts, but 1 adapters"):
        engine.generate(["a", "b"], adapter=["mine"])
    assert engine.generate("a", **GREEDY).text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_runing": 3}, "did you mean --max-running"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"adapters": {"mine": "/nowhere"}}, "there is no folder /nowhere"),
    ],
)
def test_an_engine_that_cannot_start_says_why(options: dict[str, Any], said: str) -> None:
    with pytest.raises(loraplex.EngineError, match=said):
        loraplex.serve(**options)


@pytest.mark.exhaustive
def test_a_dead_engine_fails_its_requests_and_leaves_nothing() -> None:
    with loraplex.serve() as dying:
        stream = dying.stream("Good morning", max_tokens=1000, ignore_eos=True)
        next(stream)
        (command,) = (
            each
            for each in psutil.Process().children()
            if any(str(dying.socket) in word for word in each.cmdline())
        )
        family = [command, *command.children(recursive=True)]
        command.send_signal(signal.SIGKILL)
        with pytest.raises(loraplex.EngineError, match="has lost the request"):
            list(stream)
        with pytest.raises(loraplex.EngineError, match="has lost the request"):
            dying.generate("Good morning")
    gone, alive = psutil.wait_procs(family, timeout=240)
    assert (len(gone), alive) == (len(family), [])
    assert not dying.socket.parent.exists()


@pytest.mark.exhaustive
def test_the_notebook_runs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert names["engine"]._closed
