"""Experts of tokens, joined over workers, and written as vLLM's and SGLang's clients read them."""

import base64
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.api.openai import chat, completions
from loraplex.router.api.request.formatter import ApiLimits, Formatter
from loraplex.router.api.routed_experts import RoutedTokens, as_int32, as_npy
from loraplex.router.api.sglang import generate
from loraplex.router.api.vllm import tokens
from loraplex.router.call import RequestError, TextEvent
from loraplex.server.protocol import RoutedExperts, RoutingForm
from tests.router.api.answers import HEAD, PROMPT, events, payloads, result

LIMITS = ApiLimits(base_names=("org/small",))
ASKED = {"return_routed_experts": True}


def routed(rows: np.ndarray, start: int = 0) -> RoutedExperts:
    _, layers, top_k = rows.shape
    return RoutedExperts(RoutingForm(layers, top_k, rows.itemsize), start, rows.tobytes())


@st.composite
def numbers(draw: st.DrawFn) -> np.ndarray:
    kind, most_experts = draw(st.sampled_from((("u1", 256), ("<u2", 1000))))
    shape = [draw(st.integers(1, most)) for most in (40, 12, 9)]
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    return generator.integers(0, most_experts, shape).astype(kind)


def read_npy(text: str) -> np.ndarray:
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found


def read_int32(text: str, layers: int, top_k: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, layers, top_k)


@given(numbers(), st.data())
def test_read_as_they_were(rows: np.ndarray, data: st.DataObject) -> None:
    found = read_npy(as_npy(routed(rows)))
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows)
    start = data.draw(st.integers(0, len(rows)))
    wide = read_int32(as_int32(routed(rows), start), *rows.shape[1:])
    np.testing.assert_array_equal(wide, rows[start:])


@given(numbers(), st.data())
def test_what_came_first_stays(rows: np.ndarray, data: st.DataObject) -> None:
    """Workers begin anew where they take over, in pieces of their own."""
    known, joined = 0, RoutedTokens()
    while known < len(rows):
        start, anew = 0, rows.copy()
        anew[:known] ^= 1
        stop = data.draw(st.integers(known + 1, len(rows)))
        while start < stop:
            end = data.draw(st.integers(start + 1, stop))
            joined.add(routed(anew[start:end], start))
            start = end
        known = stop
    tokens = data.draw(st.integers(1, len(rows)))
    found = joined.first(tokens)
    assert found is not None
    assert found.chosen == rows[:tokens].tobytes()


def test_a_gap_is_an_error() -> None:
    with pytest.raises(ValueError, match="experts of 3 tokens before 3 are missing"):
        RoutedTokens().add(routed(np.zeros((2, 2, 2), np.uint8), 3))


# Experts of the tokens of PROMPT and `result`, but the last.
ROWS = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)


def formatter(route: Any, **fields: Any) -> Formatter:
    if route is completions:
        body = {"prompt": "Say", **ASKED, **fields}
    elif route is chat:
        body = {"messages": [{"role": "user", "content": "Say"}], **ASKED, **fields}
    else:
        body = {"token_ids": [0, 21], "sampling_params": {}, **ASKED, **fields}
    if route is tokens:
        asked = route.parse(body, LIMITS, None)
    else:
        asked = route.parse(json.dumps(body).encode(), LIMITS)
    assert asked.call.routed_experts
    found: Formatter = asked.formatter(HEAD)
    return found


def ended() -> list[TextEvent]:
    *before, last = events()
    return [*before, msgspec.structs.replace(last, routed=routed(ROWS))]


@pytest.mark.parametrize("route", [completions, chat, tokens])
def test_as_vllm_writes_them(route: Any) -> None:
    """A choice holds them; in a stream, the chunk that ends the choice."""
    whole = msgspec.structs.replace(result(), routed=routed(ROWS))
    (choice,) = json.loads(formatter(route).whole([whole], [PROMPT]))["choices"]
    np.testing.assert_array_equal(read_npy(choice["routed_experts"]), ROWS)
    form = formatter(route, stream=True)
    stream = form.prompt(PROMPT) + b"".join(map(form.chunk, ended())) + form.end()
    choices = [each for chunk in payloads(stream)[:-1] for each in chunk["choices"]]
    said = [each for each in choices if each.get("routed_experts")]
    assert [each["finish_reason"] for each in said] == ["stop"]
    np.testing.assert_array_equal(read_npy(said[0]["routed_experts"]), ROWS)


@pytest.mark.parametrize("start", [None, 0, 2])
def test_as_sglang_writes_them(start: int | None) -> None:
    body = {"text": "Say", **ASKED, "routed_experts_start_len": start}
    asked = generate.parse(body, LIMITS, None)
    assert asked.call.routed_experts
    whole = msgspec.structs.replace(result(), routed=routed(ROWS))
    info = json.loads(asked.formatter(HEAD).whole([whole], [PROMPT]))["meta_info"]
    rows = info["prompt_tokens"] + info["completion_tokens"] - 1 - (start or 0)
    found = read_int32(info["routed_experts"], 3, 2)
    assert len(found) == rows
    np.testing.assert_array_equal(found, ROWS[start or 0 :])
    form = generate.parse(body | {"stream": True}, LIMITS, None).formatter(HEAD)
    stream = form.prompt(PROMPT) + b"".join(map(form.chunk, ended())) + form.end()
    *before, last, done = payloads(stream)
    assert done == "[DONE]"
    assert all("routed_experts" not in each["meta_info"] for each in before)
    assert last["meta_info"]["routed_experts"] == info["routed_experts"]


def test_a_start_behind_the_prompt_is_refused() -> None:
    body = {"text": "Say", **ASKED, "routed_experts_start_len": 3}
    form = generate.parse(body, LIMITS, None).formatter(HEAD)
    with pytest.raises(RequestError, match="0 to the prompt's 2 tokens") as fault:
        form.whole([result()], [PROMPT])
    assert fault.value.param == "routed_experts_start_len"


def test_nobody_gets_what_he_did_not_ask_for() -> None:
    body = {"prompt": "Say", "return_routed_experts": False}
    asked = completions.parse(json.dumps(body).encode(), LIMITS)
    assert not asked.call.routed_experts
    (choice,) = json.loads(asked.formatter(HEAD).whole([result()], [PROMPT]))["choices"]
    assert "routed_experts" not in choice
