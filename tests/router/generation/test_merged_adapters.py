"""Merges on their way through the router: every member authorised, one merge, every worker."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.errors import AdapterError, Violation
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.recipe import MergeMember, MergeRecipe
from loraplex.adapters.ref import AdapterRef
from loraplex.server.protocol import AdapterMerge, MemberSource
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.serving import COMMIT, Running, events_of, running_router

DIGEST = "x-loraplex-adapter-digest"
ONE, TWO = make_manifest("org/one").digest, make_manifest("org/two").digest


async def merge(
    router: Running, *ids: str, path: str = "/generate", **options: Any
) -> httpx.Response:
    given = {"ids": list(ids), "weights": [0.5] * len(ids)} | options
    token = given.pop("api_token", None)
    parameters = {"merged_adapters": given, "api_token": token}
    return await router.client.post(path, json={"inputs": "x", "parameters": parameters})


async def test_members_are_pinned_and_loaded_and_then_merged(
    router: Running, worker: FakeWorker
) -> None:
    answer = await merge(router, "org/one@main", "org/two", api_token="t")
    assert answer.status_code == 200
    expected = MergeRecipe((MergeMember(ONE, 0.5), MergeMember(TWO, 0.5)))
    (asked,) = worker.merges
    assert asked.recipe == expected
    assert asked.sources == (
        MemberSource(AdapterRef("hub", "org/one", COMMIT), "t"),
        MemberSource(AdapterRef("hub", "org/two", COMMIT), "t"),
    )
    assert worker.requests[0].adapter == expected.digest
    assert answer.headers[DIGEST] == expected.digest
    assert answer.headers["x-adapter-id"] == "org/one@main,org/two"
    assert answer.headers["x-adapter-source"] == "hub"


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
async def test_every_route_merges(router: Running, worker: FakeWorker, path: str) -> None:
    answer = await merge(router, "org/one", "org/two", path=path)
    assert answer.status_code == 200
    said = answer.json()[0] if path == "/" else events_of(answer.text)[-1]
    assert said["generated_text"].startswith(worker.merges[0].recipe.digest[:6])


async def test_what_leaves_an_adapter_as_it_is_merges_nothing(
    router: Running, worker: FakeWorker
) -> None:
    answer = await merge(router, "org/one", "org/two", weights=[0.0, 1.0])
    assert answer.headers[DIGEST] == TWO
    assert not worker.merges
    assert len(worker.loads) == 2, "the other one must be allowed, too"


async def test_every_member_is_authorised_for_its_caller(
    router: Running, worker: FakeWorker
) -> None:
    asked = ["org/one", "org/private"]
    assert (await merge(router, *asked, api_token="let-me-in")).status_code == 200
    refused = await merge(router, *asked, api_token="other")
    assert refused.status_code == 401
    assert "merged_adapters.ids[1]` (org/private)" in refused.text
    assert len(worker.merges) == 1
    unweighted = await merge(router, *asked, weights=[1.0, 0.0])
    assert unweighted.status_code == 401


@pytest.mark.parametrize(
    ("name", "status"), [("org/missing", 404), ("nobody-registered-this", 404), ("org/down", 503)]
)
async def test_a_member_that_fails_is_named(router: Running, name: str, status: int) -> None:
    answer = await merge(router, "org/one", name)
    assert (answer.status_code, f"ids[1]` ({name})" in answer.text) == (status, True)


async def test_a_crowd_asks_for_one_merge(router: Running, worker: FakeWorker) -> None:
    release = asyncio.Event()

    async def slow(frame: AdapterMerge) -> AdapterManifest:
        await release.wait()
        return make_manifest("merged", digest=frame.recipe.digest)

    worker.merger = slow
    asking = [asyncio.create_task(merge(router, "org/one", "org/two")) for _ in range(30)]
    await worker.until(lambda: len(worker.merges) == 1)
    release.set()
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
    assert len(worker.merges) == 1


async def test_a_refusal_is_told_with_its_violations(router: Running, worker: FakeWorker) -> None:
    violation = Violation("rank_too_large", "q_proj", "8 + 8 = 16; at most 8 is served")

    async def refuse(frame: AdapterMerge) -> AdapterManifest:
        raise AdapterError("invalid", "the adapter cannot be served", (violation,))

    worker.merger = refuse
    for _ in range(2):
        answer = await merge(router, "org/one", "org/two")
        assert (answer.status_code, answer.json()["error_type"]) == (422, "adapter_invalid")
        assert "8 + 8 = 16" in answer.text
    assert len(worker.merges) == 1, "a refusal is remembered for a while"


async def test_weights_that_cancel_are_refused(router: Running, worker: FakeWorker) -> None:
    answer = await merge(router, "org/one", "org/one@main", weights=[1.0, -1.0])
    assert (answer.status_code, "cancel" in answer.text) == (422, True)
    assert not worker.merges


async def test_a_worker_that_lacks_the_merge_makes_it(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker) as router,
    ):
        assert (await merge(router, "org/one", "org/two")).status_code == 200
        worker.forget_adapters()
        worker.drop_connections()
        await worker.until(lambda: not worker.connected)
        await worker.until(lambda: worker.connected)
        await router.until_ready()
        assert (await merge(router, "org/one", "org/two")).status_code == 200
        first, again = worker.merges
        assert (first.recipe, first.sources) == (again.recipe, again.sources)
