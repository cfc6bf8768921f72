"""Many adapters and the base in one batch answer as each does alone."""

import asyncio
import itertools
import json
from typing import Any

import httpx

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.serving import Serving

CONCURRENT = 32


async def generate(client: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> str:
    """The whole text, by way of a stream or not."""
    if not stream:
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        text = answer.json()["generated_text"]
        assert isinstance(text, str)
        return text
    parts: list[str] = []
    async with client.stream("POST", "/generate_stream", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                event = json.loads(line[5:])
                assert "error" not in event, event
                parts.append(event["token"]["text"] if not event["token"]["special"] else "")
                whole = event["generated_text"]
    assert "".join(parts) == whole
    assert isinstance(whole, str)
    return whole


def bodies() -> list[dict[str, Any]]:
    """32 greedy requests over every demo adapter and the base."""
    adapters = [None, *sorted(adapter_paths())]
    assert len(adapters) >= 7
    pairs = itertools.islice(itertools.cycle(itertools.product(EXAMPLES, adapters)), CONCURRENT)
    return [
        {"inputs": text, "parameters": {"adapter_id": name, "max_new_tokens": 48 + number}}
        for number, (text, name) in enumerate(pairs)
    ]


async def test_32_concurrent_requests_answer_as_alone(serving: Serving) -> None:
    requests = bodies()
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as client:
        alone = [await generate(client, body, stream=False) for body in requests]
        together = await asyncio.gather(
            *(generate(client, body, stream=i % 2 == 0) for i, body in enumerate(requests))
        )
    assert list(together) == alone
    by_adapter = {
        body["parameters"]["adapter_id"]: text for body, text in zip(requests, alone, strict=True)
    }
    assert len(set(by_adapter.values())) == len(by_adapter), "adapters must answer differently"
