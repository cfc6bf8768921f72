"""TGI's `top_n_tokens` against the live server: the same numbers as OpenAI's routes report."""

from typing import Any

import httpx
import pytest

from tests.router.serving import events_of

TOLERANCE = 1e-4
PARAMETERS: dict[str, Any] = {"adapter_id": "json", "max_new_tokens": 8, "details": True}


def test_they_are_those_of_completions(http: httpx.Client) -> None:
    asked = {"model": "json", "prompt": "Order", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    logprobs = http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    body = {"inputs": "Order", "parameters": {**PARAMETERS, "top_n_tokens": 3}}
    details = http.post("/generate", json=body).json()["details"]
    assert len(details["top_tokens"]) == len(details["tokens"]) == 8
    for top, expected in zip(details["top_tokens"], logprobs["top_logprobs"], strict=True):
        found = [one["logprob"] for one in top]
        assert found == pytest.approx(list(expected.values()), abs=TOLERANCE)
        assert [one["text"] for one in top] == list(expected)
    streamed = events_of(http.post("/generate_stream", json=body).text)
    assert_alike([event["top_tokens"] for event in streamed], details["top_tokens"])
    (root,) = http.post("/", json=body).json()
    assert_alike(root["details"]["top_tokens"], details["top_tokens"])


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    """Steps of other sizes round otherwise."""
    for top, other in zip(found, expected, strict=True):
        numbers = [one.pop("logprob") for one in top]
        assert numbers == pytest.approx([one["logprob"] for one in other], abs=TOLERANCE)
        assert top == [{k: v for k, v in one.items() if k != "logprob"} for one in other]


def test_more_than_the_limit_is_refused(http: httpx.Client) -> None:
    body = {"inputs": "Order", "parameters": {**PARAMETERS, "top_n_tokens": 21}}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 422
    assert "`top_n_tokens`: expected at most 20" in answer.json()["error"]
