"""A thousand requests for one cold adapter are one fetch, through a real router and worker."""

import asyncio
import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from loraplex.launcher.demo import adapter_paths
from tests.adapters.stub_hub import StubHub, running_hub
from tests.certifying.factory import certify
from tests.e2e.serving import Serving, start_serving

# `test_cold_adapter.py` has fifty callers in a short run.
pytestmark = pytest.mark.exhaustive

CALLERS = 1000
# Fewer, as a failure is remembered for some seconds only: all must have asked by then.
CALLERS_OF_BROKEN = 100
# Connections that wait for their head at once: of a thousand opened together, the last says its
# head long after it was accepted, on a busy machine later than the router waits for one.
OPENED_AT_ONCE = 50
# Of them a tenant may have seven eighths wait.
QUEUE = 2048
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
    (broken / CONFIG).write_text(json.dumps(config | {"use_qalora": True}))
    with running_hub() as stub:
        stub.publish("org/cold", sql)
        stub.publish("org/broken", broken)
        yield stub


@pytest.fixture(scope="module")
def server(hub: StubHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Without a model: what counts is the way to it."""
    serving = start_serving(
        *("--cache-dir", str(tmp_path_factory.mktemp("cache")), "--executor", certify()),
        *("--max-queue", str(QUEUE)),
        log=tmp_path_factory.mktemp("serve") / "log",
        environ=os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": ""},
    )
    try:
        yield serving
    finally:
        serving.process.terminate()
        assert serving.process.wait(timeout=240) == 0, serving.log.read_text()[-4000:]


class Answer(NamedTuple):
    status: int
    text: str


class Callers:
    """Each request has a connection of its own, as if it came from another client."""

    def __init__(self, serving: Serving) -> None:
        self.url = serving.url
        self._address = httpx.URL(serving.url)
        self._opening = asyncio.Semaphore(OPENED_AT_ONCE)

    async def ask(self, adapter: str | None) -> Answer:
        parameters = {"max_new_tokens": 4, **({"adapter_id": adapter} if adapter else {})}
        body = json.dumps({"inputs": "SELECT", "parameters": parameters}).encode()
        head = (
            "POST /generate HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        async with asyncio.timeout(TIMEOUT_S):
            async with self._opening:
                reader, writer = await asyncio.open_connection(
                    self._address.host, self._address.port
                )
                writer.write(head.encode() + body)
            answer = (await reader.read()).decode()
            writer.close()
        return Answer(int(answer.split(" ", 2)[1]), answer.partition("\r\n\r\n")[2])

    async def statuses(self, *adapters: str | None) -> list[int]:
        answers = await asyncio.gather(*map(self.ask, adapters))
        return [answer.status for answer in answers]

    async def held(self, count: int) -> None:
        """Until so many requests are being answered, or HOLD_S."""
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    running = 0.0
                    while running < count:
                        text = (await client.get(f"{self.url}/metrics")).text
                        found = re.search(r"^loraplex_requests_running (\S+)$", text, re.MULTILINE)
                        assert found is not None
                        running = float(found[1])
                        await asyncio.sleep(0.05)


async def test_a_thousand_callers_of_a_cold_adapter_cause_one_fetch(
    server: Serving, hub: StubHub
) -> None:
    callers = Callers(server)
    before = hub.downloads(WEIGHTS), hub.downloads(CONFIG)
    hub.gate.clear()
    asked = [asyncio.create_task(callers.ask("org/cold")) for _ in range(CALLERS)]
    try:
        await callers.held(CALLERS)
        others = Callers(server)  # who do not wait until all of these have opened
        assert await others.statuses(None) == [200], "the base does not wait for it"
    finally:
        hub.gate.set()
    answers = Counter(await asyncio.gather(*asked))
    assert answers == {await callers.ask("org/cold"): CALLERS}, "each as one alone"
    assert {answer.status for answer in answers} == {200}
    assert await callers.ask(None) not in answers
    assert (hub.downloads(WEIGHTS) - before[0], hub.downloads(CONFIG) - before[1]) == (1, 1)


async def test_a_broken_adapter_fails_once_and_costs_others_nothing(
    server: Serving, hub: StubHub
) -> None:
    callers = Callers(server)
    before = hub.downloads(CONFIG)
    weights = hub.downloads(WEIGHTS)
    hub.gate.clear()
    asked = [asyncio.create_task(callers.ask("org/broken")) for _ in range(CALLERS_OF_BROKEN)]
    try:
        await callers.held(CALLERS_OF_BROKEN)
        assert await Callers(server).statuses(None, "sql", "json") == [200, 200, 200]
    finally:
        hub.gate.set()
    assert Counter(a.status for a in await asyncio.gather(*asked)) == {422: CALLERS_OF_BROKEN}
    assert hub.downloads(CONFIG) == before + 1
    assert await callers.statuses("org/broken") == [422]
    fetched = hub.requests.copy()
    assert await callers.statuses("org/broken") == [422]
    assert hub.requests == fetched, "it was remembered"
    assert hub.downloads(WEIGHTS) == weights, "a refused config's weights are not fetched"
