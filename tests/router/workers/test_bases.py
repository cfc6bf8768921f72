"""Several bases behind one router: whose is a name, an adapter, a worker; who is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.server.protocol import AdapterLoad, GenerateRequest
from tests.router.fake_worker import (
    EOS,
    FakeWorker,
    ids_of,
    make_card,
    make_manifest,
    running_worker,
)
from tests.router.serving import Running, poll, running_router
from tests.router.shared.redis_server import RedisServer

RED, BLUE = "org/red", "org/blue"
# Its config says for which base an adapter is: `blue-…` for the second.
ADAPTERS = ("pirate=hub:org/red-pirate", "sql=hub:org/blue-sql")
ADMIN = {"Authorization": "Bearer boss"}


def base_of(ref: str) -> str:
    return BLUE if "blue" in ref else RED


def base_worker(name: str, digit: str, **card: Any) -> FakeWorker:
    """A worker that says its base's name and the adapter, and refuses the other base's adapters."""
    worker = FakeWorker(make_card(names=(name,), base_digest=digit * 64, **card), f"of-{digit}")

    def script(request: GenerateRequest) -> list[int]:
        adapter = "" if request.adapter is None else f" {request.adapter[:6]}"
        return [*ids_of(f"{name}{adapter}"), EOS]

    async def load(load: AdapterLoad) -> AdapterManifest:
        trained_for = base_of(load.ref.name)
        if "nowhere" in load.ref.name:
            trained_for = "org/green"
        if "either" not in load.ref.name and trained_for != name:
            raise AdapterError("invalid", f"trained for {trained_for}", (), trained_for=trained_for)
        return make_manifest(load.ref.name, base="" if "either" in load.ref.name else name)

    worker.script, worker.loader = script, load
    return worker


@asynccontextmanager
async def two_bases(
    tmp_path: Path, *, credits: int = 64, further: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[tuple[Running, FakeWorker, FakeWorker]]:
    """further: names that both have, too."""
    red, blue = base_worker(RED, "a"), base_worker(BLUE, "b", vocab_size=300)
    for worker in (red, blue):
        worker.card = msgspec.structs.replace(worker.card, names=(*worker.card.names, *further))
    red.credits = blue.credits = credits
    defaults: dict[str, Any] = {"adapters": ADAPTERS, "bases": (RED, BLUE), "admin_key": "boss"}
    async with (
        running_worker(red),
        running_worker(blue),
        running_router(tmp_path, red, blue, **(defaults | options)) as router,
    ):
        await until_ready(router, 2)
        yield router, red, blue


async def until_ready(router: Running, count: int) -> None:
    async def ready() -> bool:
        return sum(view.able for view in router.service.roster.views) == count

    await poll(ready)


async def complete(router: Running, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "x", **fields}
    return await router.client.post("/v1/completions", json=body)


async def text(router: Running, model: str, **fields: Any) -> str:
    answer = await complete(router, model, **fields)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def digest(name: str) -> str:
    return make_manifest(name).digest[:6]


async def test_each_name_goes_to_its_base(tmp_path: Path) -> None:
    pirate, sql = digest("org/red-pirate"), digest("org/blue-sql")
    async with two_bases(tmp_path) as (router, red, blue):
        assert await text(router, RED) == await text(router, "tgi") == RED
        assert await text(router, BLUE) == BLUE
        for _ in range(2):  # unresolved, and resolved
            assert await text(router, "pirate") == f"{RED} {pirate}"
            assert await text(router, "sql") == f"{BLUE} {sql}"
        assert await text(router, f"{BLUE}:sql") == f"{BLUE} {sql}"
        assert await text(router, BLUE, lora_path="sql") == f"{BLUE} {sql}"
        # Only its own config says where an unknown adapter belongs.
        assert await text(router, "org/blue-tone") == f"{BLUE} {digest('org/blue-tone')}"
        lorax = {"inputs": "x", "parameters": {"adapter_id": "sql"}}
        answer = await router.client.post("/generate", json=lorax)
        assert answer.json()["generated_text"] == f"{BLUE} {sql}"
        # What only the second base's vocabulary has.
        biased = {"logit_bias": {"290": 1}}
        for model in (BLUE, "sql", "org/blue-new"):
            assert await text(router, model, **biased)
        assert (await complete(router, RED, **biased)).status_code == 400
        assert {request.adapter is None for request in blue.requests} == {True, False}
        assert not {r.adapter for r in red.requests} & {
            r.adapter for r in blue.requests if r.adapter
        }


async def test_a_name_that_two_bases_have_means_neither(tmp_path: Path) -> None:
    """As that of two folders; one that is declared still means its base."""
    async with two_bases(tmp_path, further=("folder", BLUE)) as (router, red, blue):
        assert await text(router, RED) == RED
        assert await text(router, BLUE) == BLUE
        for path in ("folder", "folder:sql"):
            answer = await complete(router, path)
            assert answer.status_code in (400, 404, 422), answer.text
            assert "folder" in answer.text
        assert (await router.client.get("/v1/models/folder")).status_code == 404
        assert {request.adapter for worker in (red, blue) for request in worker.requests} == {None}


async def test_wrong_bases_are_refused(tmp_path: Path) -> None:
    async with two_bases(tmp_path) as (router, red, blue):
        for model, fields in ((f"{RED}:org/blue-x", {}), (RED, {"lora_path": "sql"})):
            answer = await complete(router, model, **fields)
            assert (answer.status_code, BLUE in answer.text) == (422, True), answer.text
        answer = await complete(router, "org/nowhere")
        assert (answer.status_code, "org/green" in answer.text) == (422, True)
        assert (len(red.loads), len(blue.loads)) == (4, 1)  # asked once there, else nowhere
        assert not [r for w in (red, blue) for r in w.requests]
        merged = {"ids": ["pirate", "sql"], "weights": [1, 1]}
        answer = await complete(router, "tgi", merged_adapters=merged)
        assert (answer.status_code, "several bases" in answer.text) == (422, True), answer.text


async def test_content_of_both_bases_is_apart(tmp_path: Path) -> None:
    """An adapter that fits both, under one digest: requests, pins and evictions go by base."""
    async with two_bases(tmp_path) as (router, red, blue):
        either = digest("org/either")
        assert await text(router, f"{RED}:org/either") == f"{RED} {either}"
        assert await text(router, f"{BLUE}:org/either") == f"{BLUE} {either}"
        assert await text(router, "org/either") == f"{RED} {either}"
        body = {"name": "both", "ref": "hub:org/either", "pin": True}
        answer = await router.client.post("/v1/adapters", json=body, headers=ADMIN)
        assert (answer.status_code, answer.json()["base"]) == (200, RED), answer.text
        await red.until(lambda: bool(red.pins))
        assert not blue.pins
        deleted = await router.client.delete("/v1/adapters/both", headers=ADMIN)
        assert deleted.status_code == 200
        await red.until(lambda: "evict" in [action for action, _ in red.orders])
        assert not blue.orders


async def test_an_adapter_that_names_no_base_waits_for_the_first(tmp_path: Path) -> None:
    blue = base_worker(BLUE, "b")
    async with (
        running_worker(blue),
        running_router(tmp_path, blue, bases=(RED, BLUE)) as router,
    ):
        await until_ready(router, 1)
        answer = await complete(router, "org/either")
        assert answer.status_code == 503, answer.text
        assert not blue.requests
        assert await text(router, f"{BLUE}:org/either") == f"{BLUE} {digest('org/either')}"


async def test_lists_show_each_base(tmp_path: Path) -> None:
    async with two_bases(tmp_path) as (router, _, _):
        await text(router, "pirate")
        await text(router, "sql")
        models = (await router.client.get("/v1/models")).json()["data"]
        assert {model["id"]: model["parent"] for model in models} == {
            RED: None,
            BLUE: None,
            "pirate": RED,
            "sql": BLUE,
        }
        assert (await router.client.get(f"/v1/models/{BLUE}")).json()["id"] == BLUE
        fleet = (await router.client.get("/v1/fleet", headers=ADMIN)).json()
        assert [(one["name"], one["workers_ready"]) for one in fleet["bases"]] == [
            (RED, 1),
            (BLUE, 1),
        ]
        assert {one["base"] for one in fleet["workers"]} == {RED, BLUE}
        assert {one["name"]: one["base"] for one in fleet["adapters"]} == {
            "pirate": RED,
            "sql": BLUE,
        }
        metrics = (await router.client.get("/metrics")).text
        assert f'loraplex_generated_tokens_total{{base="{BLUE}"}} ' in metrics
        assert f'loraplex_workers_ready{{base="{RED}"}} 1.0' in metrics
        usage = (await router.client.get("/v1/usage", headers=ADMIN)).json()["data"]
        assert {row["adapter"]: row["base"] for row in usage} == {"pirate": RED, "sql": BLUE}


async def test_a_base_that_dies_leaves_the_other_alone(tmp_path: Path) -> None:
    async with two_bases(tmp_path, worker_wait_s=0.0) as (router, red, blue):
        gate, begun = asyncio.Event(), asyncio.Event()

        async def hold(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
            if index == 1:
                begun.set()
                await gate.wait()

        red.before_token = hold
        running = asyncio.create_task(text(router, RED))
        await begun.wait()
        await blue.stop()
        blue.drop_connections()
        await until_ready(router, 1)
        for model in (BLUE, "org/blue-x"):
            answer = await complete(router, model)
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True), answer.text
            assert BLUE in answer.text
        wanted = (await router.client.get("/metrics")).text
        assert f'loraplex_base_wanted{{base="{BLUE}"}} 2.0' in wanted
        assert f'loraplex_base_wanted{{base="{RED}"}} 0.0' in wanted
        assert (await router.client.get("/health/ready")).status_code == 200
        gate.set()
        assert await running == await text(router, RED) == RED
        ids = {model["id"] for model in (await router.client.get("/v1/models")).json()["data"]}
        assert {RED, BLUE, "pirate", "sql"} <= ids


async def test_a_request_wakes_a_base_that_was_never_there(tmp_path: Path) -> None:
    red, blue = base_worker(RED, "a"), base_worker(BLUE, "b")
    async with (
        running_worker(red),
        running_router(
            tmp_path, red, blue, bases=(RED, BLUE), adapters=ADAPTERS, worker_wait_s=240.0
        ) as router,
    ):
        waiting = [asyncio.create_task(text(router, model)) for model in (BLUE, "sql")]

        async def waits() -> bool:
            name = f'loraplex_waiting_room_requests{{base="{BLUE}"}} 2.0'
            return name in (await router.client.get("/metrics")).text

        await poll(waits)
        assert await text(router, RED) == RED
        async with running_worker(blue):
            assert await asyncio.gather(*waiting) == [BLUE, f"{BLUE} {digest('org/blue-sql')}"]


async def test_an_adapter_waits_for_a_base_whose_names_no_worker_said_yet(tmp_path: Path) -> None:
    """The operator calls the second base `small`; its worker knows what adapters call it."""
    red, blue = base_worker(RED, "a"), base_worker(BLUE, "b")
    blue.card = make_card(names=("small", BLUE), base_digest="b" * 64)
    options: dict[str, Any] = {"adapters": ADAPTERS, "bases": (RED, "small")}
    options |= {"worker_wait_s": 240.0, "check_adapters": "start"}
    async with running_worker(red), running_router(tmp_path, red, blue, **options) as router:

        async def waits() -> bool:
            name = 'loraplex_waiting_room_requests{base="small"} 1.0'
            return name in (await router.client.get("/metrics")).text

        await poll(waits)  # the check of the declared adapter
        async with running_worker(blue):
            assert await text(router, "sql") == f"{BLUE} {digest('org/blue-sql')}"
            assert (await complete(router, "org/nowhere")).status_code == 422
            models = (await router.client.get("/v1/models")).json()["data"]
        assert {model["id"]: model["parent"] for model in models}["sql"] == "small"


async def test_a_full_base_holds_no_other_back(tmp_path: Path) -> None:
    async with two_bases(tmp_path, credits=1, max_queue=1) as (router, red, blue):
        gate = asyncio.Event()

        async def hold(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
            await gate.wait()

        blue.before_token = hold
        queue = router.service.bases.of(BLUE).fleet.queue
        tasks = [asyncio.create_task(text(router, BLUE)) for _ in range(2)]

        async def full() -> bool:
            return len(queue) == 1

        await poll(full)
        assert (await complete(router, BLUE)).status_code == 429
        assert await text(router, RED) == RED
        gate.set()
        assert await asyncio.gather(*tasks) == [BLUE, BLUE]


async def test_a_request_runs_for_one_base(tmp_path: Path) -> None:
    """One that was read for the first base, and whose adapter is the second's, counts there."""
    async with two_bases(tmp_path) as (router, _, blue):
        gate = asyncio.Event()

        async def hold(worker: FakeWorker, request: GenerateRequest, index: int) -> None:
            await gate.wait()

        blue.before_token = hold
        asked = asyncio.create_task(text(router, "org/blue-tone"))
        await blue.until(lambda: bool(blue.requests))
        counts = [await router.metric(_running(base)) for base in (RED, BLUE)]
        gate.set()
        await asked
        assert counts == [0, 1]
        assert [await router.metric(_running(base)) for base in (RED, BLUE)] == [0, 0]


def _running(base: str) -> str:
    return f'loraplex_requests_running{{base="{base}"}}'


async def test_keys_open_bases(tmp_path: Path) -> None:
    async with two_bases(tmp_path, auth="keys", check_adapters="start") as (router, _, _):
        body = {"tenant": "acme", "models": [BLUE, f"{BLUE}:*"]}
        made = await router.client.post("/v1/keys", json=body, headers=ADMIN)
        assert made.status_code == 201, made.text
        router.client.headers["Authorization"] = f"Bearer {made.json()['key']}"
        assert await text(router, BLUE) == BLUE
        assert (await complete(router, RED)).status_code == 403

        async def opened() -> bool:
            return (await complete(router, "sql")).status_code == 200

        await poll(opened)  # once its base is known
        assert (await complete(router, "pirate")).status_code == 403
        for misspelt, is_meant in (("sqls", True), ("pirates", False)):
            refused = await complete(router, f"{BLUE}:{misspelt}")
            assert refused.status_code == 404
            assert ("did you mean" in refused.text) == is_meant
        models = (await router.client.get("/v1/models")).json()["data"]
        assert {model["id"] for model in models} == {BLUE, "sql"}


@pytest.mark.parametrize("names", [("org/green",), ("org/green", "org/yellow")])
async def test_a_worker_of_no_declared_base_is_refused(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    green = FakeWorker(make_card(names=names, base_digest="c" * 64))
    async with (
        running_worker(green),
        running_router(tmp_path, green, wait=False, bases=(RED, BLUE)) as router,
    ):

        async def refused() -> bool:
            problem = router.service.roster.clients[0].problem or ""
            return f"this router serves {RED}, {BLUE} (--base)" in problem

        await poll(refused)


async def test_what_is_of_a_base_that_has_another_name_is_refused_until_it_is_refreshed(
    tmp_path: Path, redis: RedisServer
) -> None:
    """The adapter fits any base: no worker would say that it is for another."""
    either = digest("org/either")
    body = {"name": "both", "ref": "hub:org/either", "pin": True}
    one: dict[str, Any] = {"redis": redis.url, "adapters": ()}
    async with two_bases(tmp_path / "a", **one, bases=(BLUE, RED)) as (router, _, blue):
        answer = await router.client.post("/v1/adapters", json=body, headers=ADMIN)
        assert (answer.status_code, answer.json()["base"]) == (200, BLUE), answer.text
        assert await text(router, "both") == f"{BLUE} {either}"
    red = base_worker(RED, "a")
    options = {**one, "bases": (RED, "org/green"), "admin_key": "boss"}
    async with (
        running_worker(red),
        running_router(tmp_path / "b", red, **options) as router,
    ):
        answer = await complete(router, "both")
        assert (answer.status_code, BLUE in answer.text) == (422, True), answer.text
        assert not red.requests
        assert not red.pins
        answer = await router.client.post("/v1/adapters/both/refresh", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        assert await text(router, "both") == f"{RED} {either}"
        await red.until(lambda: bool(red.pins))


async def test_what_a_router_of_one_base_has_is_of_the_first(
    tmp_path: Path, redis: RedisServer
) -> None:
    body = {"name": "both", "ref": "hub:org/either"}
    options: dict[str, Any] = {"redis": redis.url, "admin_key": "boss"}
    red = base_worker(RED, "a")
    async with running_worker(red):
        async with running_router(tmp_path / "a", red, **options) as router:
            answer = await router.client.post("/v1/adapters", json=body, headers=ADMIN)
            assert answer.status_code == 200, answer.text
        for bases in ((RED, BLUE), ()):
            async with running_router(tmp_path / "b", red, bases=bases, **options) as router:
                assert await text(router, "both") == f"{RED} {digest('org/either')}"
