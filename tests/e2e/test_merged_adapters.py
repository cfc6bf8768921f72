"""Adapters merged for a request, through the whole product on the demo model."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from loraplex.launcher.demo import EXAMPLES
from tests.e2e.serving import Serving
from tests.grids import beyond

MESSAGE = EXAMPLES[0]
DIGEST = "x-loraplex-adapter-digest"


def generate(http: httpx.Client, **parameters: Any) -> httpx.Response:
    body = {"inputs": MESSAGE, "parameters": {"max_new_tokens": 60, **parameters}}
    return http.post("/generate", json=body)


def merged(ids: list[str], weights: list[float], **options: Any) -> dict[str, Any]:
    return {"merged_adapters": {"ids": ids, "weights": weights, **options}}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text = answer.json()["generated_text"]
    assert isinstance(text, str)
    return text


def test_a_weight_of_one_alone_is_the_adapter_itself(http: httpx.Client) -> None:
    alone = generate(http, adapter_id="json")
    both = generate(http, **merged(["json", "sql"], [1.0, 0.0], density=0.0))
    assert text_of(both) == text_of(alone)
    assert both.headers[DIGEST] == alone.headers[DIGEST]
    assert both.headers["x-adapter-id"] == "json,sql"


def test_a_merge_that_is_computed_answers_as_its_member(http: httpx.Client) -> None:
    alone = generate(http, adapter_id="json")
    both = generate(http, **merged(["json", "sql"], [1.0, 1e-6]))
    assert both.headers[DIGEST] != alone.headers[DIGEST]
    assert text_of(both) == text_of(alone)


@pytest.mark.parametrize("strategy", beyond(1, ["dare_ties", "linear", "ties", "dare_linear"]))
def test_every_strategy_answers_the_same_each_time(http: httpx.Client, strategy: str) -> None:
    def asked(other: float) -> httpx.Response:
        merge = merged(["json", "sql"], [0.5, other], merge_strategy=strategy, density=0.5)
        return generate(http, max_new_tokens=16, **merge)

    first, again = asked(0.5), asked(0.5)
    assert text_of(first) == text_of(again)
    assert first.headers[DIGEST] == again.headers[DIGEST]
    assert asked(0.4).headers[DIGEST] != first.headers[DIGEST]


def test_streams_give_the_same_text(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 40, **merged(["json", "pirate"], [0.7, 0.3])}
    body = {"inputs": MESSAGE, "parameters": parameters}
    whole = text_of(http.post("/generate", json=body))
    stream = http.post("/generate_stream", json=body).text
    last = [line for line in stream.splitlines() if line.startswith("data:")][-1]
    assert json.loads(last[5:])["generated_text"] == whole
    assert http.post("/", json=body).json()[0]["generated_text"] == whole


async def test_a_crowd_gets_one_merge(serving: Serving) -> None:
    asked = merged(["sentiment", "pirate"], [0.6, 0.6], merge_strategy="ties", density=0.3)
    body = {"inputs": MESSAGE, "parameters": {"max_new_tokens": 8, **asked}}
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as client:
        answers = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({text_of(answer) for answer in answers}) == 1


def test_openai_routes_merge_and_scale(http: httpx.Client) -> None:
    def complete(model: str, **fields: Any) -> tuple[str, str]:
        body = {"model": model, "prompt": MESSAGE, "max_tokens": 40, "temperature": 0, **fields}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.headers[DIGEST]

    base = http.get("/v1/models").json()["data"][0]["id"]
    plain = complete("json")
    assert complete("json", adapter_scale=1) == plain
    for scale in (0.25, -1.5):  # the same content, and what a merge of it alone answers
        scaled = complete("json", adapter_scale=scale)
        assert scaled[1] == plain[1]
        assert scaled[0] == complete(base, **merged(["json"], [scale]))[0] != plain[0]
    both = generate(http, **merged(["json", "sql"], [0.5, 0.5]), max_new_tokens=40)
    assert complete(base, **merged(["json", "sql"], [0.5, 0.5]))[1] == both.headers[DIGEST]


@pytest.mark.parametrize(
    ("parameters", "status", "said"),
    [
        (merged(["json", "nobody"], [1, 1]), 404, "merged_adapters.ids[1]"),
        (merged(["json"] * 2, [1.0, -1.0]), 422, "cancel"),
        (merged(["json", "sql"], [1]), 422, "merged_adapters.weights"),
        (merged(["json", "sql"], [1, 1], merge_strategy="ties"), 422, "density"),
        (merged(["json"], [1]) | {"adapter_id": "sql"}, 422, "cannot both"),
    ],
)
def test_what_cannot_be_merged(
    http: httpx.Client, parameters: dict[str, Any], status: int, said: str
) -> None:
    answer = generate(http, **parameters)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
