"""The time of devices: what usage says of all callers adds up to what the engine was busy."""

import asyncio
from typing import Any

import httpx

from tests.e2e.serving import Serving
from tests.e2e.test_mixed_batch import bodies, generate
from tests.router.serving import poll


async def busy_s(client: httpx.AsyncClient) -> dict[str, float]:
    """Seconds of the worker's device, by use."""
    (worker,) = (await client.get("/v1/fleet")).json()["workers"]
    text = (await client.get(worker["url"].replace("ws:", "http:") + "/metrics")).text
    head = 'loraplex_worker_device_seconds_total{use="'
    lines = [line for line in text.splitlines() if line.startswith(head)]
    return {line[len(head) :].split('"')[0]: float(line.split()[-1]) for line in lines}


async def used(client: httpx.AsyncClient) -> dict[str, Any]:
    rows = (await client.get("/v1/usage")).json()["data"]
    return {row["adapter"]: row["device_s"] for row in rows}


async def test_all_callers_seconds_are_the_engines(serving: Serving) -> None:
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as client:
        busy_before, used_before = await busy_s(client), await used(client)
        requests = bodies()
        for index, body in enumerate(requests):
            if index % 4 == 0:  # aborted by the router, before its last token
                body["parameters"]["stop"] = ["e"]
        await asyncio.gather(
            *(generate(client, body, stream=i % 2 == 0) for i, body in enumerate(requests))
        )

        async def is_idle() -> bool:
            (worker,) = (await client.get("/v1/fleet")).json()["workers"]
            return bool(worker["running"] == worker["waiting"] == 0)

        await poll(is_idle)
        busy, found = await busy_s(client), await used(client)
    grown = {use: busy[use] - busy_before[use] for use in busy}
    seconds = {name: found[name] - used_before.get(name, 0.0) for name in found}
    steps = grown["adapters"] + grown["base"] + grown["late"]
    assert steps > 0
    assert abs(sum(seconds.values()) - steps) <= 0.02 * steps, (seconds, grown)
    of_adapters = sum(value for name, value in seconds.items() if name)
    assert abs(of_adapters - grown["adapters"]) <= 0.02 * steps
    assert all(seconds[body["parameters"]["adapter_id"] or ""] > 0 for body in requests)
