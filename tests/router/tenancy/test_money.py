"""Time of devices and money, from workers' events to usage, answers and metrics."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.generation.sequence import Inbox
from loraplex.server.protocol import DeviceCost, ErrorCode, GenerateRequest, TokenEvent
from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.http.test_disconnects import Gate, ask, leave
from tests.router.serving import Running, events_of, poll, running_router

PRICES = {
    "currency": "EUR",
    "prices": [{"device_second": 2.0, "copy_second": 1.0, "million_completion_tokens": 1000.0}],
}


@pytest.fixture
async def priced(tmp_path: Path) -> AsyncIterator[tuple[Running, FakeWorker]]:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps(PRICES))
    worker = FakeWorker()
    worker.cost = DeviceCost(0.5, 0.25)
    async with running_worker(worker), running_router(tmp_path, worker, prices=file) as router:
        yield router, worker


async def usage(router: Running) -> dict[str, Any]:
    found = (await router.client.get("/v1/usage")).json()
    assert found["currency"] == "EUR"
    (row,) = found["data"]
    return dict(row)


async def test_answers_usage_and_metrics_say_what_a_request_cost(
    priced: tuple[Running, FakeWorker],
) -> None:
    router, _ = priced
    body = {"model": BASE_NAME, "prompt": "x", "max_tokens": 4, "n": 2}
    whole = (await router.client.post("/v1/completions", json=body)).json()["usage"]
    cost = 2 * (0.5 * 2.0 + 0.25) + whole["completion_tokens"] / 1000
    assert (whole["cost"], whole["device_seconds"]) == (pytest.approx(cost), 1.0)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await router.client.post("/v1/completions", json={**body, **more})
    last = events_of(streamed.text)[-1]["usage"]
    assert (last["cost"], last["device_seconds"]) == (whole["cost"], 1.0)
    row = await usage(router)
    assert (row["device_s"], row["copy_s"]) == (2.0, 1.0)
    assert row["cost"] == pytest.approx(2 * cost)
    records = (await router.client.get("/v1/usage/requests")).json()["data"]
    assert [record["cost"] for record in records] == [pytest.approx(cost)] * 2
    assert await router.metric('loraplex_adapter_device_seconds_total{adapter="_base"}') == 2.0
    counted = await router.metric('loraplex_adapter_cost_total{adapter="_base"}')
    assert counted == pytest.approx(2 * cost)


async def test_who_leaves_pays_too(priced: tuple[Running, FakeWorker]) -> None:
    router, worker = priced
    gate = Gate(worker, 5)
    asking = ask(router, stream=True)
    await worker.until(lambda: len(worker.requests) == 1)
    await leave(asking)

    async def is_paid() -> bool:
        return bool((await usage(router))["device_s"] == 0.5)

    await poll(is_paid)
    row = await usage(router)
    assert row["cost"] == pytest.approx(0.5 * 2.0 + 0.25 + row["completion_tokens"] / 1000)
    assert (row["requests"], row["unfinished"]) == (1, 1)
    counted = await router.metric("loraplex_adapter_cost_total")
    assert counted == pytest.approx(row["cost"])
    gate.opened.set()


async def test_who_leaves_a_whole_answer_pays_for_all_tokens_that_came(
    priced: tuple[Running, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, worker = priced
    came: list[TokenEvent] = []
    put = Inbox.put

    def noted(inbox: Inbox, slot: int, event: TokenEvent, at: float) -> None:
        came.append(event)
        put(inbox, slot, event, at)

    monkeypatch.setattr(Inbox, "put", noted)
    gate = Gate(worker, 5)
    held = worker.before_token

    async def first_is_read() -> bool:
        return await router.metric("loraplex_generated_tokens_total") == 1

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if index == 1:
            await poll(first_is_read)
        return await held(worker, request, index)

    worker.before_token = before_token
    asking = ask(router, stream=False)

    async def have_come() -> bool:
        return len(came) == 5

    await poll(have_come)
    await leave(asking)
    await router.until_idle()
    assert (await usage(router))["completion_tokens"] == 5
    gate.opened.set()


async def test_without_prices_answers_are_as_they_were(
    tmp_path: Path,
) -> None:
    worker = FakeWorker()
    worker.cost = DeviceCost(0.5)
    async with running_worker(worker), running_router(tmp_path, worker) as router:
        body = {"model": BASE_NAME, "prompt": "x", "max_tokens": 4}
        answer = (await router.client.post("/v1/completions", json=body)).json()
        assert not {"cost", "device_seconds"} & set(answer["usage"])
        found = (await router.client.get("/v1/usage")).json()
        assert found["currency"] is None
        assert (found["data"][0]["device_s"], found["data"][0]["cost"]) == (0.5, 0.0)
        costs = await router.client.get("/v1/organization/costs?start_time=0")
        assert (costs.status_code, costs.json()["error"]["code"]) == (501, "not_served")


async def test_who_asks_for_costs_and_usage_by_day_has_a_key(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, auth="keys", admin_key="boss") as router,
    ):
        late = str(1 << 33)  # no day has been there yet
        for path in ("costs", "usage/completions"):
            for start in ("0", late):
                url = f"/v1/organization/{path}?start_time={start}"
                assert (await router.client.get(url)).status_code == 401
                headers = {"Authorization": "Bearer boss"}
                answer = await router.client.get(url, headers=headers)
                assert answer.status_code == (501 if path == "costs" else 200)
                assert path == "costs" or start == "0" or answer.json()["data"] == []


async def test_costs_and_usage_by_day_as_openai_has_them(
    priced: tuple[Running, FakeWorker],
) -> None:
    router, _ = priced
    body = {"model": BASE_NAME, "prompt": "x", "max_tokens": 4}
    answer = (await router.client.post("/v1/completions", json=body)).json()
    day = {"start_time": str(int(answer["created"]))}
    costs = (await router.client.get("/v1/organization/costs", params=day)).json()
    (result,) = costs["data"][-1]["results"]
    assert result["amount"] == {"value": pytest.approx(answer["usage"]["cost"]), "currency": "eur"}
    path = "/v1/organization/usage/completions"
    used = (await router.client.get(path, params=day | {"group_by": "model"})).json()
    (result,) = used["data"][-1]["results"]
    assert (result["num_model_requests"], result["model"]) == (1, "")
    assert result["output_tokens"] == answer["usage"]["completion_tokens"]
    assert (used["has_more"], used["next_page"]) == (False, None)
