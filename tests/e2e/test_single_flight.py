"""A hundred requests for one cold adapter are one fetch, through a real router and worker."""

import asyncio
import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from launcher.demo import adapter_paths
from tests.adapters.stub_hub import StubHub, running_hub
from tests.e2e.serving import Serving, start_serving

CALLERS = 100
TIMEOUT_S = 200.0
# The source answers nobody until all callers wait, or so long: it would be given up otherwise.
HOLD_S = 3.0
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubHub]:
    sql = adapter_paths()["sql"]
    broken = tmp_path_factory.mktemp("broken")
    for path in sql.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / CONFIG).read_text())
    (broken / CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    with running_hub() as stub:
        stub.publish("org/cold", sql)
        stub.publish("org/broken", broken)
        yield stub


@pytest.fixture(scope="module")
def server(hub: StubHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Without a model: what counts is the way to it."""
    serving = start_serving(
        *("--cache-dir", str(tmp_path_factory.mktemp("cache")), "--executor", "certify"),
        log=tmp_path_factory.mktemp("serve") / "log",
        environ=os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": ""},
    )
    try:
        yield serving
    finally:
        serving.process.terminate()
        assert serving.process.wait(timeout=60) == 0, serving.log.read_text()[-4000:]


@asynccontextmanager
async def client_of(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=serving.url, limits=limits, timeout=TIMEOUT_S, trust_env=False
    ) as client:
        yield client


async def ask(client: httpx.AsyncClient, adapter: str | None) -> int:
    parameters = {"max_new_tokens": 1, **({"adapter_id": adapter} if adapter else {})}
    answer = await client.post("/generate", json={"inputs": "SELECT", "parameters": parameters})
    return answer.status_code


async def held(client: httpx.AsyncClient, count: int) -> None:
    """Until so many requests are being answered, or HOLD_S."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HOLD_S):
            running = 0.0
            while running < count:
                text = (await client.get("/metrics")).text
                found = re.search(r"^loraplex_requests_running (\S+)$", text, re.MULTILINE)
                assert found is not None
                running = float(found[1])


async def test_a_hundred_callers_of_a_cold_adapter_cause_one_fetch(
    server: Serving, hub: StubHub
) -> None:
    async with client_of(server) as client:
        hub.gate.clear()
        asked = [asyncio.create_task(ask(client, "org/cold")) for _ in range(CALLERS)]
        try:
            await held(client, CALLERS)
            assert await ask(client, None) == 200, "the base does not wait for it"
        finally:
            hub.gate.set()
        assert Counter(await asyncio.gather(*asked)) == {200: CALLERS}
    assert (hub.downloads(WEIGHTS), hub.downloads(CONFIG)) == (1, 1)


async def test_a_broken_adapter_fails_once_and_costs_others_nothing(
    server: Serving, hub: StubHub
) -> None:
    async with client_of(server) as client:
        before = hub.downloads(CONFIG)
        hub.gate.clear()
        asked = [asyncio.create_task(ask(client, "org/broken")) for _ in range(CALLERS)]
        try:
            await held(client, len(asked))
            others = [ask(client, adapter) for adapter in (None, "sql", "json")]
            assert await asyncio.gather(*others) == [200, 200, 200]
        finally:
            hub.gate.set()
        assert Counter(await asyncio.gather(*asked)) == {422: len(asked)}
        assert hub.downloads(CONFIG) == before + 1
        assert await ask(client, "org/broken") == 422
        fetched = hub.requests.copy()
        assert await ask(client, "org/broken") == 422
        assert hub.requests == fetched, "it was remembered"
    assert hub.downloads(WEIGHTS) == 1, "the weights of a config that is refused are not fetched"
