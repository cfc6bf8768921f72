"""The list of adapters, by pages and by words of their names."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.names import aliases
from loraplex.router.routes import adapters as adapter_routes
from tests.router.fake_worker import FakeWorker
from tests.router.serving import Running, running_router

ADMIN = {"Authorization": "Bearer boss"}
NAMES = [f"sql-{number}" for number in range(3)] + ["tone", "zulu"]


@pytest.fixture
async def router(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Running]:
    declared = tuple(f"{name}=hub:org/{name}" for name in NAMES)
    options: dict[str, Any] = {"adapters": declared, "admin_key": "boss"}
    async with running_router(tmp_path, worker, **options) as running:
        body = {"name": "sql-9", "ref": "hub:org/nine", "tenant": "acme"}
        answer = await running.client.post("/v1/adapters", json=body, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        yield running


async def page(router: Running, query: str) -> tuple[list[str], str | None]:
    answer = await router.client.get(f"/v1/adapters?{query}", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return [one["id"] for one in body["data"]], body.get("next")


async def test_pages(router: Running) -> None:
    assert await page(router, "") == (sorted([*NAMES, "sql-9"]), None)
    found, after = [], ""
    while True:
        names, following = await page(router, f"limit=2&after={after}")
        found += names
        if following is None:
            break
        after = following
    assert found == [*NAMES, "sql-9"]
    assert await page(router, "search=sql&limit=3") == (NAMES[:3], "sql-2")
    assert await page(router, "search=sql&limit=3&after=sql-2") == (["sql-9"], None)
    assert await page(router, "search=ql-&tenant=acme") == (["sql-9"], None)
    assert await page(router, "search=acme") == ([], None)
    assert await page(router, "after=sql-1x&limit=1") == (["sql-2"], "sql-2")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "search=a%0Ab", "find=a"])
async def test_queries_that_cannot_be(router: Running, query: str) -> None:
    answer = await router.client.get(f"/v1/adapters?{query}", headers=ADMIN)
    assert answer.status_code == 400, answer.text


async def test_more_names_than_a_list_holds(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliases, "MAX_LISTED", 4)
    monkeypatch.setattr(adapter_routes, "MAX_LISTED", 4)
    assert await page(router, "") == ([*NAMES, "sql-9"], None)  # a page of 1,000
    models = (await router.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models if model["parent"]] == NAMES[:4]
    one = await router.client.get("/v1/models/zulu")
    assert one.status_code == 200
