"""The lifecycle API against a real router and a scripted worker."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.common.loopback import is_loopback
from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.config import RouterConfig
from loraplex.server.protocol import AdapterLoad, ErrorCode, GenerateRequest
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.serving import Running, of_kept_router, poll, running_router

KEY = "the admin's key"
VERSION = {"reference": "org/one", "weight": 100}
ONE = make_manifest("org/one").digest


async def call(router: Running, method: str, path: str, **body: Any) -> httpx.Response:
    return await router.client.request(method, f"/v1/adapters{path}", json=body or None)


async def register(router: Running, name: str, ref: str, **more: Any) -> httpx.Response:
    return await call(router, "POST", "", name=name, ref=ref, **more)


async def generate(router: Running, name: str) -> httpx.Response:
    return await router.client.post("/v1/completions", json={"model": name, "prompt": "x"})


class Held:
    """Sequences of the worker that wait before their first token."""

    def __init__(self, worker: FakeWorker) -> None:
        self.gate = asyncio.Event()
        self.worker = worker
        worker.before_token = self.before_token

    async def before_token(
        self, worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        await self.gate.wait()
        return None


async def test_register_admits_and_serves(router: Running, worker: FakeWorker) -> None:
    answer = await register(router, "mine", "hub:org/one@main", token="hf_secret")
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert (shown["id"], shown["state"], shown["digest"]) == ("mine", "ready", ONE)
    assert (shown["ranks"], shown["targets"], shown["nbytes"]) == ([8], ["q_proj"], 1000)
    assert shown["workers"][0]["disk"] is True
    assert "hf_secret" not in answer.text
    assert worker.loads[0].token == "hf_secret"
    assert (await generate(router, "mine")).status_code == 200
    assert worker.requests[0].adapter == ONE
    listed = (await call(router, "GET", "")).json()["data"]
    assert [one["id"] for one in listed] == ["mine", "pirate"]
    assert [record["digest"] for record in listed[0]["history"]] == [ONE]
    assert listed[0]["last_used"] is not None
    assert (listed[1]["state"], listed[1]["digest"]) == ("registered", None)
    names = {model["id"] for model in (await router.client.get("/v1/models")).json()["data"]}
    assert names == {"fake-base", "mine", "pirate"}


async def test_register_by_parts(router: Running, worker: FakeWorker) -> None:
    answer = await call(router, "POST", "", name="mine", source="hub", id="org/one", revision="v1")
    assert answer.json()["ref"] == "hub:org/one@v1"


@of_kept_router
@of_kept_router
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"name": "x"}, 400, "give ref"),
        ({"name": "a/b/c", "ref": "org/one"}, 400, "as the Hub writes owner/name"),
        ({"name": "x", "ref": "plain"}, 400, "names no source"),
        ({"name": "x", "ref": "org/one", "id": "org/two"}, 400, "give it, or"),
        ({"name": "x", "ref": "org/one", "pinned": True}, 400, "pinned"),
        (
            {"name": "x", "ref": "org/one", "source": "huub"},
            400,
            "one of https, hub, local, modelscope, s3",
        ),
        ({"name": "x", "ref": "org/one", "guards": {}}, 400, "`guards`: they need `versions`"),
        ({"name": "x", "ref": "org/one", "guards": None}, 400, "`guards`: they need `versions`"),
        ({"name": "x", "revision": "v1", "versions": [VERSION]}, 400, "`versions`: give it, or"),
        ({"name": "x", "ref": "org/one", "versions": [VERSION]}, 400, "`versions`: give it, or"),
        ({"name": "x", "ref": "local:a", "token": "t"}, 400, "`token`: only adapters of the Hub"),
        ({"name": "x", "ref": "org/missing"}, 404, "no repository"),
        ({"name": "x", "ref": "org/private"}, 401, "private"),
        ({"name": "x", "ref": "org/down"}, 503, "does not answer"),
        ({"name": "pirate", "ref": "org/other"}, 409, "declared by --adapter"),
        ({"name": "pirate", "ref": "org/other", "replace": True}, 409, "declared by --adapter"),
        ({"name": "fake-base", "ref": "org/one"}, 409, "base model"),
        ({"name": "tgi", "ref": "org/one"}, 409, "base model"),
    ],
)
async def test_what_cannot_be_registered(
    kept_router: Running, body: dict[str, Any], status: int, words: str
) -> None:
    answer = await call(kept_router, "POST", "", **body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    listed = (await call(kept_router, "GET", "")).json()["data"]
    assert [one["id"] for one in listed] == ["pirate"]


@pytest.mark.parametrize("other", [{"pin": True}, {"token": "t"}, {"replace": True}])
async def test_versions_of_a_registered_name_come_alone(
    router: Running, worker: FakeWorker, other: dict[str, Any]
) -> None:
    versions = [{**VERSION, "weight": 5}]
    assert (await call(router, "POST", "", name="new", versions=versions[:1], **other)).is_success
    answer = await call(router, "POST", "", name="new", versions=versions, **other)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == next(iter(other))


async def test_a_name_keeps_its_content_until_it_is_refreshed(
    router: Running, worker: FakeWorker
) -> None:
    content = {"now": "first"}

    async def load(load: AdapterLoad) -> AdapterManifest:
        return make_manifest(content["now"])

    worker.loader = load
    first, second = make_manifest("first").digest, make_manifest("second").digest
    assert (await register(router, "mine", "local:one")).status_code == 200
    await call(router, "POST", "/mine/load")
    content["now"] = "second"
    held = Held(worker)
    old = asyncio.create_task(generate(router, "mine"))
    await worker.until(lambda: len(worker.requests) == 1)
    answer = (await call(router, "POST", "/mine/refresh")).json()
    assert (answer["old_digest"], answer["new_digest"]) == (first, second)
    assert answer["changed"] is True
    new = asyncio.create_task(generate(router, "mine"))
    await worker.until(lambda: len(worker.requests) == 2)
    assert [request.adapter for request in worker.requests] == [first, second]
    assert ("evict", (first,)) not in worker.orders
    held.gate.set()
    assert {(await old).status_code, (await new).status_code} == {200}
    assert (await old).headers["x-loraplex-adapter-digest"] == first
    await worker.until(lambda: ("evict", (first,)) in worker.orders)
    history = (await call(router, "GET", "/mine")).json()["history"]
    assert [record["digest"] for record in history] == [first, second]
    again = (await call(router, "POST", "/mine/refresh")).json()
    assert again["changed"] is False


async def test_a_failed_refresh_keeps_what_works(router: Running, worker: FakeWorker) -> None:
    await register(router, "mine", "org/one")

    async def broken(load: AdapterLoad) -> AdapterManifest:
        return await FakeWorker().loader(AdapterLoad("x", load.ref.__class__("hub", "missing")))

    worker.loader = broken
    assert (await call(router, "POST", "/mine/refresh")).status_code == 404
    shown = (await call(router, "GET", "/mine")).json()
    assert (shown["state"], shown["digest"]) == ("ready", ONE)
    assert "no adapter" in shown["error"]
    assert (await generate(router, "mine")).status_code == 200


async def test_unload_drains_and_load_brings_it_back(router: Running, worker: FakeWorker) -> None:
    await register(router, "mine", "org/one")
    await call(router, "POST", "/mine/load")
    assert worker.resident == {ONE}
    held = Held(worker)
    running = asyncio.create_task(generate(router, "mine"))
    await worker.until(lambda: len(worker.requests) == 1)
    answer = await call(router, "POST", "/mine/unload", wait_s=0)
    assert (answer.status_code, answer.json()["state"]) == (202, "unloading")
    assert answer.json()["running"] == 1
    refused = await generate(router, "mine")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert (await call(router, "POST", "/mine/load")).status_code == 409
    assert worker.resident == {ONE}
    held.gate.set()
    assert (await running).status_code == 200
    answer = await call(router, "POST", "/mine/unload")
    assert (answer.status_code, answer.json()["state"]) == (200, "unloaded")
    assert answer.json()["resident_on"] == []
    assert worker.resident == set()
    assert (await generate(router, "mine")).status_code == 409
    assert (await call(router, "POST", "/mine/refresh")).status_code == 409
    assert (await call(router, "POST", "/mine/load")).json()["resident_on"] == ["fake-0"]
    assert (await generate(router, "mine")).status_code == 200


async def test_content_of_another_name_stays(router: Running, worker: FakeWorker) -> None:
    for name in ("mine", "yours"):
        await register(router, name, "org/one")
        await call(router, "POST", f"/{name}/load")
    assert (await call(router, "POST", "/mine/unload")).json()["state"] == "unloaded"
    assert worker.resident == {ONE}
    assert (await generate(router, "yours")).status_code == 200


async def test_deleted_is_gone_until_it_is_registered_again(
    router: Running, worker: FakeWorker
) -> None:
    await register(router, "mine", "org/one", pin=True)
    assert worker.resident == {ONE}
    assert (await call(router, "DELETE", "/mine")).json()["deleted"] is True
    answer = await generate(router, "mine")
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "gone")
    for method, path in (("GET", "/mine"), ("DELETE", "/mine"), ("POST", "/mine/load")):
        assert (await call(router, method, path)).status_code == 410
    await worker.until(lambda: worker.resident == set() and not worker.pins)
    assert (await call(router, "DELETE", "/never")).status_code == 404
    assert (await register(router, "mine", "org/two")).status_code == 200
    assert (await generate(router, "mine")).status_code == 200


async def test_pins_reach_every_worker_and_those_that_come_back(tmp_path: Path) -> None:
    first, second = FakeWorker(worker_id="a"), FakeWorker(worker_id="b")
    async with (
        running_worker(first),
        running_worker(second),
        running_router(tmp_path, first, second) as router,
    ):

        async def both() -> bool:
            return len(router.service.bases.first.fleet.sessions) == 2

        await poll(both)
        answer = await register(router, "mine", "org/one", pin=True)
        assert answer.json()["pinned"] is True
        for worker in (first, second):
            await worker.until(lambda worker=worker: worker.pins == {ONE})  # type: ignore[misc]
            assert ("load", (ONE,)) in worker.orders
        second.pins = frozenset()
        second.forget_adapters()
        second.resident.clear()
        second.drop_connections()
        await second.until(lambda: second.pins == {ONE})
        loads = [load.expected_digest for load in second.loads]
        assert loads[-1] == ONE, "fetched before it is pinned"
        assert (await call(router, "POST", "/mine/unpin")).json()["pinned"] is False
        for worker in (first, second):
            await worker.until(lambda worker=worker: not worker.pins)  # type: ignore[misc]
        assert (await call(router, "POST", "/mine/pin")).json()["pinned"] is True


async def test_who_registers_again_takes_only_what_is_said(
    router: Running, worker: FakeWorker
) -> None:
    await register(router, "mine", "org/one", pin=True, token="hf_own")
    assert (await register(router, "mine", "org/one")).json()["pinned"] is True
    assert [load.token for load in worker.loads] == ["hf_own", "hf_own"]
    other = await register(router, "mine", "org/two", replace=True)
    assert other.json()["pinned"] is True
    assert worker.loads[-1].token is None, "it was given for another reference"
    two = make_manifest("org/two").digest
    await worker.until(lambda: worker.pins == {two})
    assert (await register(router, "mine", "org/two", pin=False)).json()["pinned"] is False
    await worker.until(lambda: not worker.pins)
    assert (await register(router, "mine", "org/two")).json()["pinned"] is False
    await register(router, "mine", "org/two", pin=True)
    await call(router, "DELETE", "/mine")
    assert (await register(router, "mine", "org/two")).json()["pinned"] is False


async def test_a_declared_name_stays_pinned_when_it_is_registered_again(router: Running) -> None:
    assert (await call(router, "POST", "/pirate/pin")).json()["pinned"] is True
    assert (await register(router, "pirate", "org/pirate")).json()["pinned"] is True
    body = {"lora_name": "pirate", "lora_path": "hub:org/pirate", "load_inplace": True}
    assert (await router.client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    assert (await call(router, "GET", "/pirate")).json()["pinned"] is True


async def test_a_pin_that_finds_no_room_is_refused(router: Running, worker: FakeWorker) -> None:
    await register(router, "mine", "org/one")
    worker.order_error = "pinned adapters leave no room"
    answer = await call(router, "POST", "/mine/pin")
    assert answer.status_code == 503
    assert "leave no room" in answer.json()["error"]["message"]
    assert (await call(router, "GET", "/mine")).json()["pinned"] is False
    assert not worker.pins


async def test_what_is_declared_is_changed_where_it_is_declared(
    tmp_path: Path, worker: FakeWorker
) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text("adapters: [{name: mine, ref: org/one}]")
    options: dict[str, Any] = {"adapters": ("pirate=hub:org/pirate",), "adapters_file": file}
    async with running_router(tmp_path, worker, **options) as router:

        async def applied() -> bool:
            return (await call(router, "GET", "/mine")).status_code == 200

        await poll(applied)
        refused = [
            await call(router, "DELETE", "/mine"),
            await call(router, "POST", "/mine/pin"),
            await call(router, "DELETE", "/pirate"),
            await register(router, "mine", "org/two", replace=True),
        ]
        assert [answer.status_code for answer in refused] == [409] * 4
        assert "the adapters file: change it there" in refused[0].text
        for name in ("mine", "pirate"):
            assert (await call(router, "POST", f"/{name}/refresh")).status_code == 200
            assert (await call(router, "POST", f"/{name}/unload")).json()["state"] == "unloaded"
            assert (await register(router, name, f"org/{name}")).status_code in (200, 409)
            assert (await call(router, "POST", f"/{name}/load")).json()["state"] == "ready"


async def test_shapes_of_vllm(router: Running, worker: FakeWorker) -> None:
    body = {"lora_name": "mine", "lora_path": "/srv/my loras/one/"}
    answer = await router.client.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, "'mine' added" in answer.text) == (200, True)
    assert worker.loads[0].ref.name == "/srv/my%20loras/one"
    assert worker.loads[0].ref.source == "local"
    other = await router.client.post("/v1/load_lora_adapter", json=body | {"lora_path": "/srv/b"})
    assert other.status_code == 400
    inplace = body | {"lora_path": "/srv/b", "load_inplace": True}
    assert (await router.client.post("/v1/load_lora_adapter", json=inplace)).status_code == 200
    assert (await generate(router, "mine")).status_code == 200
    gone = await router.client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert (gone.status_code, "'mine' removed" in gone.text) == (200, True)
    assert (await generate(router, "mine")).status_code == 410
    unknown = await router.client.post("/v1/unload_lora_adapter", json={"lora_name": "never"})
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    "header",
    [None, "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ké"],
)
async def test_the_key_is_asked_for(tmp_path: Path, header: str | None) -> None:
    async with running_router(tmp_path, admin_key=KEY) as router:
        headers = {} if header is None else {"authorization": header.encode()}
        for method, path in (
            ("GET", "/v1/adapters"),
            ("POST", "/v1/adapters"),
            ("DELETE", "/v1/adapters/x"),
            ("POST", "/v1/adapters/x/unload"),
            ("POST", "/v1/load_lora_adapter"),
        ):
            answer = await router.client.request(method, path, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401, (method, path)
            assert KEY not in answer.text
        good = {"authorization": f"Bearer {KEY}"}
        assert (await router.client.get("/v1/adapters", headers=good)).status_code == 200


async def test_without_a_key_only_this_machine_may(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        assert (await router.client.get("/v1/adapters")).status_code == 200
        page = {"origin": "https://evil.example"}
        answer = await router.client.post("/v1/adapters/x/unload", headers=page)
        assert answer.status_code == 403
    async with running_router(tmp_path, host="0.0.0.0", auth="none") as router:
        answer = await router.client.get("/v1/adapters")
        assert answer.status_code == 403
        assert "--admin-key-file" in answer.json()["error"]["message"]
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "host")] == [
        *(True, True, True),
        *(False, False),
    ]
    assert KEY not in repr(RouterConfig(workers=())), "there is no key by default"
