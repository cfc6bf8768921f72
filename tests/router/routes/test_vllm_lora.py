"""vLLM's two LoRA routes: its statuses where scripts look for them, the table's everywhere else."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.errors import AdapterError, AdapterErrorCode, Violation
from loraplex.server.protocol import AdapterLoad
from tests.router.fake_worker import FakeWorker, make_manifest
from tests.router.routes.test_keys import ADMIN, keyed
from tests.router.serving import Running, running_router

ONE = "hub:org/one"


async def load(router: Running, name: str = "mine", path: str = ONE, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return await router.client.post("/v1/load_lora_adapter", json=body)


async def unload(router: Running, name: str = "mine", **more: Any) -> httpx.Response:
    body = {"lora_name": name, **more}
    return await router.client.post("/v1/unload_lora_adapter", json=body)


async def generate(router: Running, name: str = "mine") -> int:
    answer = await router.client.post("/v1/completions", json={"model": name, "prompt": "x"})
    return answer.status_code


def fault(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


async def test_a_second_load(router: Running, worker: FakeWorker) -> None:
    first = await load(router)
    assert (first.status_code, first.text) == (
        200,
        "Success: LoRA adapter 'mine' added successfully.",
    )
    told = (await router.client.get("/v1/adapters/mine")).json()
    assert told["state"] == "ready"
    assert len(told["resident_on"]) == 1
    for path in (ONE, "hub:org/two"):
        again = await load(router, path=path)
        assert fault(again) == (400, "conflict")
        assert "already been loaded" in again.text
    assert (await load(router, path="hub:org/two", load_inplace=True)).status_code == 200
    told = (await router.client.get("/v1/adapters/mine")).json()
    assert told["digest"] == make_manifest("org/two").digest


async def test_of_two_loads_at_once_one_is_the_second(router: Running) -> None:
    answers = await asyncio.gather(*(load(router) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]


async def test_what_was_unloaded_is_not_found(router: Running) -> None:
    assert (await unload(router)).status_code == 404
    await load(router)
    gone = await unload(router, lora_int_id=7)
    assert gone.text == "Success: LoRA adapter 'mine' removed successfully."
    assert fault(await unload(router)) == (404, "gone")
    assert await generate(router) == 410
    other = await router.client.get("/v1/adapters/mine")
    assert other.status_code == 410
    assert (await load(router)).status_code == 200
    assert await generate(router) == 200


@pytest.mark.parametrize(
    ("name", "path"),
    [("team/sql-v2", ONE), ("org/one", "hub:org/two"), ("a.b/rollout", ONE), ("x/load", ONE)],
)
async def test_a_name_may_have_a_slash(router: Running, name: str, path: str) -> None:
    """In a path it is escaped; a reference of the same words means the registered adapter."""
    one = f"/v1/adapters/{name.replace('/', '%2F')}"
    assert (await load(router, name, path)).status_code == 200
    assert await generate(router, name) == 200
    shown = await router.client.get(one)
    assert (shown.status_code, shown.json()["id"]) == (200, name)
    assert shown.json()["ref"].startswith(path)
    assert (await router.client.get(one.replace("%2F", "%2f") + "/history")).status_code == 200
    assert (await router.client.get(f"/v1/models/{name}")).json()["id"] == name
    assert (await router.client.post(f"{one}/unload")).status_code == 200
    assert await generate(router, name) == 409
    assert (await router.client.post(f"{one}/load")).status_code == 200
    assert (await router.client.delete(one)).status_code == 200
    assert await generate(router, name) == 410


async def test_what_an_operator_unloaded_is_loaded_again(router: Running) -> None:
    await load(router)
    assert (await router.client.post("/v1/adapters/mine/unload")).status_code == 200
    assert await generate(router) == 409
    assert fault(await load(router, path="hub:org/two")) == (400, "conflict")
    assert (await load(router)).status_code == 200
    assert await generate(router) == 200


async def test_what_is_declared(router: Running) -> None:
    assert fault(await load(router, "pirate", "hub:org/pirate")) == (400, "conflict")
    assert fault(await load(router, "pirate", ONE, load_inplace=True)) == (400, "conflict")
    assert (await load(router, "pirate", "hub:org/pirate", load_inplace=True)).status_code == 200
    refused = await unload(router, "pirate")
    assert fault(refused) == (400, "conflict")
    assert "--adapter" in refused.text
    assert fault(await load(router, "fake-base")) == (400, "conflict")


@pytest.mark.parametrize(
    ("code", "here", "elsewhere"),
    [
        ("not_found", 404, 404),
        ("invalid", 400, 422),
        ("too_large", 400, 422),
        ("forbidden", 403, 403),
        ("unauthorized", 401, 401),
        ("unavailable", 503, 503),
        ("conflict", 400, 409),
        ("gone", 404, 410),
    ],
)
async def test_what_cannot_be_had(
    router: Running, worker: FakeWorker, code: AdapterErrorCode, here: int, elsewhere: int
) -> None:
    violations = (Violation("rank_too_large", "r", "1024 is more than 64"),)

    async def refuse(_: AdapterLoad) -> Any:
        raise AdapterError(code, "why not", violations if code == "invalid" else ())

    worker.loader = refuse
    answer = await load(router)
    assert answer.status_code == here
    assert "why not" in answer.text
    assert ("1024 is more than 64" in answer.text) == (code == "invalid")
    body = {"name": "mine", "ref": ONE}
    assert (await router.client.post("/v1/adapters", json=body)).status_code == elsewhere
    assert await generate(router) == 404, "nothing was registered"
    records = (await router.client.get("/v1/audit")).json()["data"]
    told = {record["action"]: record["status"] for record in records}
    assert told["POST /v1/load_lora_adapter"] == here


async def test_a_load_that_finds_no_room_registers_nothing(
    router: Running, worker: FakeWorker
) -> None:
    worker.order_error = "pinned adapters leave no room"
    assert fault(await load(router)) == (503, "unavailable")
    worker.order_error = None
    assert (await load(router)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("load", {"lora_name": "", "lora_path": ONE}, "lora_name"),
        ("load", {"lora_name": "mine"}, "lora_path"),
        ("load", {"lora_name": "mine", "lora_path": ""}, "lora_path"),
        ("load", {"lora_name": "mine", "lora_path": "mine"}, "lora_path"),
        ("load", {"lora_name": "mine", "lora_path": ".."}, "lora_path"),
        ("load", {"lora_name": "a/b/c", "lora_path": ONE}, "lora_name"),
        ("load", {"lora_name": "mine", "lora_path": ONE, "load_in_place": True}, "load_in_place"),
        ("unload", {}, "lora_name"),
        ("unload", {"lora_name": "mine", "surprise": 1}, "surprise"),
    ],
)
async def test_faults(router: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = await router.client.post(f"/v1/{path}_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_what_vllm_takes(router: Running) -> None:
    more: dict[str, Any] = {
        "base_model_name": "x",
        "is_3d_lora_weight": False,
        "load_inplace": False,
    }
    assert (await load(router, **more)).status_code == 200
    assert (await unload(router, lora_int_id=None)).status_code == 200


async def test_who_may(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        assert fault(await load(router)) == (401, "invalid_api_key")
        router.client.headers.update(ADMIN)
        assert (await load(router)).status_code == 200
    async with running_router(tmp_path, worker) as router:
        router.client.headers["origin"] = "https://page.example"
        assert fault(await load(router)) == (403, "forbidden")


async def test_sagemakers_three_routes(router: Running) -> None:
    """A name is registered as often as it is asked for, but means one thing."""
    client = router.client
    for preload in (False, True):
        body = {"name": "mine", "src": ONE, "preload": preload, "pin": preload}
        answer = await client.post("/adapters", json=body)
        assert (answer.status_code, answer.text) == (200, "Adapter mine registered")
        told = (await client.get("/v1/adapters/mine")).json()
        assert (len(told["resident_on"]), told["pinned"]) == (preload, preload)
    listed = (await client.get("/adapters")).json()["adapters"]
    assert {"name": "mine", "src": ONE, "pin": True} in listed
    assert await generate(router) == 200
    other = await client.post("/adapters", json={"name": "mine", "src": "hub:org/two"})
    assert fault(other) == (400, "conflict")
    gone = await client.delete("/adapters/mine")
    assert (gone.status_code, gone.text) == (200, "Adapter mine unregistered")
    assert await generate(router) == 410
    assert fault(await client.delete("/adapters/mine"))[0] == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "", "src": ONE}, "name"),
        ({"name": "a", "src": ""}, "src"),
        ({"name": "a", "src": "alias"}, "src"),
        ({"name": "a", "src": ONE, "prompt_prefix": "x"}, "prompt_prefix"),
    ],
)
async def test_sagemakers_bodies(router: Running, body: dict[str, Any], param: str) -> None:
    refused = await router.client.post("/adapters", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
