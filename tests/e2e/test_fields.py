"""vLLM's and SGLang's fields, as the published SDK sends them, on a real server."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.floats import read_floats
from loraplex.launcher.demo import EXAMPLES, model_path
from tests.e2e.serving import Serving

BASE = "loraplex/demo"
MESSAGE = EXAMPLES[0]
USER = {"role": "user", "content": MESSAGE}
ROUTES = ("chat", "completions")
# Each asks for nothing.
NEUTRAL: list[tuple[str, Any]] = [
    ("skip_special_tokens", True),
    ("include_stop_str_in_output", False),
    ("spaces_between_special_tokens", True),
    ("echo", False),
    ("use_beam_search", False),
    ("length_penalty", 1.0),
    ("early_stopping", False),
    ("priority", 0),
    ("return_hidden_states", False),
    ("no_stop_trim", False),
    ("logits_processors", []),
    ("vllm_xargs", {}),
    ("kv_transfer_params", {}),
    ("separate_reasoning", True),
    ("include_reasoning", True),
    ("structured_outputs", None),
    ("response_format", {"type": "text"}),
    ("best_of", 1),
    ("lora_path", None),
    ("guided_json", None),
    ("frobnicate", None),
    ("add_generation_prompt", True),
    ("continue_final_message", False),
]


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    url = f"{serving.url}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as sdk:
        yield sdk


def ask(client: openai.OpenAI, route: str, model: str = "pirate", **fields: Any) -> Any:
    """Greedy, unless told otherwise. Fields that the SDK does not know go into `extra_body`."""
    known = {"stream", "logprobs", "top_logprobs", "max_tokens", "stop", "messages", "prompt"}
    sent: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "model": model}
    sent |= {name: value for name, value in fields.items() if name in known}
    sent["extra_body"] = {name: value for name, value in fields.items() if name not in known}
    if route == "chat":
        return client.chat.completions.create(**{"messages": [USER], **sent})
    return client.completions.create(**{"prompt": MESSAGE, **sent})


def text_of(route: str, answer: Any) -> str:
    choice = answer.choices[0]
    return str(choice.message.content if route == "chat" else choice.text)


def streamed_text(route: str, parts: list[Any]) -> str:
    choices = [part.choices[0] for part in parts if part.choices]
    return "".join((c.delta.content or "") if route == "chat" else c.text for c in choices)


@pytest.fixture(scope="module", params=ROUTES)
def plain(request: pytest.FixtureRequest, client: openai.OpenAI) -> tuple[str, str]:
    """A route, and its answer to nothing special."""
    return request.param, text_of(request.param, ask(client, request.param))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_what_asks_for_nothing_changes_nothing(
    client: openai.OpenAI, route: str, stream: bool
) -> None:
    def text(**fields: Any) -> str:
        found = ask(client, route, stream=stream, max_tokens=3, **fields)
        return streamed_text(route, [*found]) if stream else text_of(route, found)

    plain = text()
    own = ("add_special_tokens", route == "completions")
    for name, value in (*NEUTRAL, own):
        assert text(**{name: value}) == plain, name
    assert text(**dict(NEUTRAL)) == plain


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (f"{BASE}:pirate", {}),
        (BASE, {"lora_path": "pirate"}),
        (f"{BASE}:", {"lora_path": "pirate"}),
        ("pirate", {"lora_path": "pirate"}),
    ],
)
def test_sglangs_names(
    client: openai.OpenAI, plain: tuple[str, str], model: str, fields: dict[str, Any]
) -> None:
    route, text = plain
    assert text_of(route, ask(client, route, model, **fields)) == text
    base = ask(client, route, f"{BASE}:")
    assert base.model == BASE
    assert text_of(route, base) == text_of(route, ask(client, route, BASE)) != text
    with pytest.raises(openai.BadRequestError, match="contradicts"):
        ask(client, route, "sql", lora_path="pirate")


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        (
            {"guided_decoding": {"json": {}}},
            "guided_decoding",
            "unsupported_parameter",
            "response_f",
        ),
        ({"lora_path": ["pirate"]}, "lora_path", "unsupported_parameter", "into `model`"),
        ({"skip_special_token": True}, "skip_special_token", "unknown_parameter", "did you mean"),
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter", "Unrecognized"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", None, "whole vocabulary"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_refusals_are_distinguished(
    client: openai.OpenAI, route: str, fields: dict[str, Any], param: str, code: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        ask(client, route, **fields)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("route", ROUTES)
def test_token_ids(client: openai.OpenAI, serving: Serving, route: str) -> None:
    whole = ask(client, route, "json", max_tokens=100, return_token_ids=True)
    choice = whole.choices[0]
    prompt_ids = whole.prompt_token_ids if route == "chat" else choice.prompt_token_ids
    assert len(prompt_ids) == whole.usage.prompt_tokens
    assert len(choice.token_ids) == whole.usage.completion_tokens
    said = {"prompt": MESSAGE} if route == "completions" else {"messages": [USER]}
    asked = httpx.post(f"{serving.url}/tokenize", json={"model": "json", **said})
    assert asked.json()["tokens"] == prompt_ids
    ended = httpx.post(f"{serving.url}/detokenize", json={"tokens": choice.token_ids})
    assert ended.json()["prompt"].startswith(text_of(route, whole).strip())
    parts = [*ask(client, route, "json", max_tokens=100, return_token_ids=True, stream=True)]
    streamed = [i for part in parts if part.choices for i in part.choices[0].token_ids]
    assert streamed == choice.token_ids
    first = parts[0] if route == "chat" else parts[0].choices[0]
    assert first.prompt_token_ids == prompt_ids


@pytest.mark.parametrize("route", ROUTES)
def test_special_tokens_of_the_text(client: openai.OpenAI, route: str) -> None:
    plain = text_of(route, ask(client, route, "json", max_tokens=100))
    shown: dict[str, Any] = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    text = text_of(route, ask(client, route, "json", max_tokens=100, **shown))
    assert text == f"{plain}</s>"
    parts = [*ask(client, route, "json", max_tokens=100, stream=True, **shown)]
    assert streamed_text(route, parts) == text


@pytest.mark.parametrize("route", ROUTES)
def test_stop_strings_may_stay(client: openai.OpenAI, route: str) -> None:
    plain = text_of(route, ask(client, route, "json", max_tokens=100))
    stop = plain[5:7]
    cut = plain[: plain.index(stop)]
    assert text_of(route, ask(client, route, "json", stop=[stop])) == cut
    kept = ask(client, route, "json", stop=[stop], include_stop_str_in_output=True)
    assert text_of(route, kept) == cut + stop


def test_prompt_logprobs_are_those_of_an_echo(client: openai.OpenAI) -> None:
    answer = ask(client, "completions", echo=True, logprobs=2, prompt_logprobs=3)
    choice = answer.choices[0]
    scored = choice.prompt_logprobs
    assert scored[0] is None
    assert len(scored) == answer.usage.prompt_tokens
    for told, value in zip(scored[1:], choice.logprobs.token_logprobs[1:], strict=False):
        own, *others = told.values()
        assert own["logprob"] == pytest.approx(value)
        ranks = [own["rank"], *(one["rank"] for one in others)]
        assert set(ranks) >= {1, 2, 3}
        best_first = sorted(told.values(), key=lambda one: int(one["rank"]))
        logprobs = [one["logprob"] for one in best_first]
        assert logprobs == sorted(logprobs, reverse=True)
    chat = ask(client, "chat", prompt_logprobs=0)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert all(len(one) == 1 for one in chat.prompt_logprobs[1:])


@pytest.mark.parametrize("route", ROUTES)
def test_tokens_as_ids(client: openai.OpenAI, route: str) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2} if route == "chat" else {"logprobs": 2}
    asked: dict[str, Any] = {
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "max_tokens": 100,
    }
    choice = ask(client, route, "json", **wanted, **asked).choices[0]
    found = choice.logprobs
    tokens = [t.token for t in found.content] if route == "chat" else found.tokens
    assert tokens == [f"token_id:{i}" for i in choice.token_ids]
    tops = found.top_logprobs[0] if route == "completions" else found.content[0].top_logprobs
    names = [*tops] if route == "completions" else [top.token for top in tops]
    assert all(name.startswith("token_id:") for name in names)


def head_of_demo() -> np.ndarray:
    """Float64 `[vocabulary, hidden]`: its embedding, which is its head."""
    with open_weights(model_path() / "model.safetensors") as weights:
        [found] = (each for each in weights.tensors() if each.name == "model.embed_tokens.weight")
        values = read_floats(weights.read(found), found.dtype)
    head: np.ndarray = values.reshape(found.shape).astype(np.float64)
    return head


@pytest.mark.parametrize("model", [BASE, "json"])
@pytest.mark.parametrize("route", ROUTES)
def test_last_states_give_the_logits(client: openai.OpenAI, route: str, model: str) -> None:
    """No adapter of the demo changes the head, so a state gives the last token's logprobs."""
    wanted = {"logprobs": True, "top_logprobs": 3} if route == "chat" else {"logprobs": 3}
    asked: dict[str, Any] = {"return_hidden_states": True, "return_token_ids": True, **wanted}
    head = head_of_demo()
    for most in (1, 9):
        choice = ask(client, route, model, max_tokens=most, ignore_eos=True, **asked).choices[0]
        logits = head @ np.array(choice.hidden_states)
        logprob = (
            logits[choice.token_ids[-1]]
            - logits.max()
            - math.log(np.exp(logits - logits.max()).sum())
        )
        found = choice.logprobs
        told = found.content[-1].logprob if route == "chat" else found.token_logprobs[-1]
        assert logprob == pytest.approx(told, abs=1e-4)
    *_, last = ask(client, route, model, max_tokens=9, ignore_eos=True, stream=True, **asked)
    part = last.choices[0].delta if route == "chat" else last.choices[0]
    assert part.hidden_states == pytest.approx(choice.hidden_states, abs=1e-4)


def test_prompts_are_cut(client: openai.OpenAI) -> None:
    long = "order " * 3000
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "completions", prompt=long)
    assert caught.value.code == "context_length_exceeded"
    for side in ("left", "right"):
        asked: dict[str, Any] = {
            "prompt": long,
            "truncate_prompt_tokens": -1,
            "truncation_side": side,
        }
        answer = ask(client, "completions", **asked)
        assert answer.usage.prompt_tokens == 1024 - 24
    chat = ask(client, "chat", truncate_prompt_tokens=7, return_token_ids=True)
    whole = ask(client, "chat", return_token_ids=True)
    assert chat.prompt_token_ids == whole.prompt_token_ids[-7:]


def test_a_salt_keeps_what_is_cached_apart(client: openai.OpenAI) -> None:
    def cached(**fields: Any) -> int:
        usage = ask(client, "completions", prompt="salted " * 60, **fields).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    assert cached() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_begins_with_the_message_that_it_continues(
    client: openai.OpenAI, stream: bool
) -> None:
    begun = [USER, {"role": "assistant", "content": "Arr, "}]
    asked: dict[str, Any] = {"messages": begun, "echo": True, "stream": stream}
    asked |= {"add_generation_prompt": False, "continue_final_message": True}
    found = ask(client, "chat", **asked)
    text = streamed_text("chat", [*found]) if stream else text_of("chat", found)
    assert text.startswith("Arr, ")


@pytest.mark.parametrize("route", ROUTES)
def test_the_callers_id_and_place(client: openai.OpenAI, route: str) -> None:
    answer = ask(client, route, request_id="mine-7", priority=3)
    assert answer.id.endswith("-mine-7")
    with pytest.raises(openai.BadRequestError, match="priority"):
        ask(client, route, priority=-1)
