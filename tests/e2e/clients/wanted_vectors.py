"""Vectors as openai's own client gets them, for scripts of other clients."""

from typing import Any

import openai

from tests.e2e.clients.asking import KEY, check

TEXTS = ["what is it", "a text"]
MODEL = "one"


def expected(url: str) -> list[list[float]]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    return [one.embedding for one in answer.data]


def alike(found: Any, wanted: list[float], what: str) -> None:
    check(len(found) == len(wanted), f"{what}: {len(found)} numbers")
    check(max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5, what)
