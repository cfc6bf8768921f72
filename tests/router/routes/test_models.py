"""`/v1/models`: every name of the base, adapters with what they come from, to whom it is shown."""

from pathlib import Path
from typing import Any

from loraplex.router.workers.bases import agreed
from tests.router.fake_worker import (
    BASE_NAME,
    MAX_CONTEXT,
    FakeWorker,
    make_card,
    running_worker,
)
from tests.router.routes.test_keys import ADMIN, bearer, create, keyed
from tests.router.serving import Running, running_router

ADAPTERS = (
    "hubs=hub:org/tone@v2",
    "folders=local:/srv/loras/tone%20two",
    "buckets=s3:bucket/team/tone",
    "hosts=https:files.example/team/tone",
)
WHOLE = {name: ref for name, _, ref in (text.partition("=") for text in ADAPTERS)}
TOLD = {"hubs": "hub:org/tone@v2", "folders": "tone%20two", "buckets": "tone", "hosts": "tone"}


async def models(router: Running, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    answer = await router.client.get("/v1/models", headers=headers)
    assert answer.status_code == 200, answer.text
    listed: list[dict[str, Any]] = answer.json()["data"]
    for model in listed:
        one = await router.client.get(f"/v1/models/{model['id']}", headers=headers)
        assert one.json() == model
    return listed


async def test_models(router: Running) -> None:
    base, pirate = await models(router)
    fixed = {"object": "model", "created": 0, "owned_by": "loraplex", "max_model_len": MAX_CONTEXT}
    assert base == fixed | {"id": BASE_NAME, "root": BASE_NAME, "parent": None}
    assert pirate == fixed | {"id": "pirate", "root": "hub:org/pirate", "parent": BASE_NAME}
    one = await router.client.get("/v1/models/alias:pirate")
    assert one.json() == pirate
    assert (await router.client.get(f"/v1/models/alias:{BASE_NAME}")).status_code == 404
    missing = await router.client.get("/v1/models/org/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_every_name_that_the_operator_gave(tmp_path: Path) -> None:
    names = ("served", "gpt-x", "org/base", "base-folder", "pirate")
    card = make_card(names=names, listed=("served", "gpt-x", "org/base", "pirate"), root="org/base")
    async with (
        running_worker(FakeWorker(card)) as worker,
        running_router(tmp_path, worker, adapters=("pirate=hub:org/pirate",)) as router,
    ):
        listed = await models(router)
        assert [model["id"] for model in listed] == ["served", "gpt-x", "org/base", "pirate"]
        assert [model["root"] for model in listed] == [*["org/base"] * 3, "hub:org/pirate"]
        assert [model["parent"] for model in listed] == [*[None] * 3, "served"]
        for name in ("served", "gpt-x", "base-folder"):
            body = {"model": name, "prompt": "x"}
            answer = await router.client.post("/v1/completions", json=body)
            assert answer.json()["model"] == "served"
        unlisted = await router.client.get("/v1/models/base-folder")
        assert (unlisted.json()["id"], unlisted.json()["root"]) == ("base-folder", "org/base")


async def test_whoever_may_register_sees_references_whole(
    tmp_path: Path, worker: FakeWorker
) -> None:
    async with running_router(tmp_path, worker, adapters=ADAPTERS) as router:
        assert {one["id"]: one["root"] for one in (await models(router))[1:]} == WHOLE


async def test_callers_do_not_see_where_folders_lie(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker, adapters=ADAPTERS) as router:
        key = await create(router, tenant="acme")
        assert {one["id"]: one["root"] for one in (await models(router, bearer(key)))[1:]} == TOLD
        named = {"name": "own", "ref": "local:/srv/secret/own", "tenant": "other"}
        assert (await router.client.post("/v1/adapters", json=named, headers=ADMIN)).is_success
        assert "own" not in {one["id"] for one in await models(router, bearer(key))}


def test_workers_of_one_base_list_the_names_of_all() -> None:
    old = make_card(names=("first", "folder"))
    new = make_card(names=("second", "org/base"), listed=("second", "org/base"), root="org/base")
    together = agreed(new, [old, new])
    assert together.listed == ("first", "second", "org/base")
    assert together.root == "org/base"
