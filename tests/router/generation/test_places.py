"""A request takes its place before work is done for it, and what is refused is counted as such."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.router.generation.tokenise import AnswerShapes
from loraplex.router.text.template_sandbox import TemplateSandbox
from tests.router.fake_worker import BASE_NAME, FakeWorker, make_manifest, running_worker
from tests.router.generation.test_limits import hold
from tests.router.routes.test_keys import ADMIN, bearer, complete, create, keyed
from tests.router.serving import Running, poll

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
GRAMMAR = {"guided_regex": "[ab]"}


class Gate:
    """Costly work in the place of what it is put for: it lasts until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.let_go = asyncio.Event()

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.begun += 1
        await self.let_go.wait()
        raise AdapterError("unavailable", "its outcome is of no interest")


def costly_grammars(worker: FakeWorker, gate: Gate, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AnswerShapes, "_check", gate)


def own_templates(worker: FakeWorker, gate: Gate, patch: pytest.MonkeyPatch) -> None:
    async def load(_: Any) -> Any:
        return make_manifest("pirate", chat_template=TEMPLATE)

    worker.loader = load
    patch.setattr(TemplateSandbox, "written", gate)


def cold_adapters(worker: FakeWorker, gate: Gate, patch: pytest.MonkeyPatch) -> None:
    worker.loader = gate


async def ask(router: Running, key: str, **fields: Any) -> httpx.Response:
    message = {"role": "user", "content": "x"}
    body = {"model": "pirate", "messages": [message], "max_tokens": 2, **GRAMMAR, **fields}
    return await router.client.post("/v1/chat/completions", json=body, headers=bearer(key))


@pytest.mark.parametrize("costly", [costly_grammars, own_templates, cold_adapters])
async def test_one_of_ten_is_worked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, costly: Callable[..., None]
) -> None:
    worker, gate = FakeWorker(), Gate()
    costly(worker, gate, monkeypatch)
    async with running_worker(worker), keyed(tmp_path, worker) as router:
        limits = {"concurrency": 1, "requests_per_minute": 2}
        key = await create(router, id="l", tenant="acme", limits=limits)
        asking = [asyncio.create_task(ask(router, key)) for _ in range(10)]
        waiting = set(asking)
        while len(waiting) > 1:
            done, waiting = await asyncio.wait(
                waiting, timeout=240, return_when=asyncio.FIRST_COMPLETED
            )
            for one in done:
                assert one.result().status_code == 429, one.result().text
                assert one.result().headers["x-ratelimit-remaining-requests"] == "1"
        assert gate.begun == 1
        (kept,) = waiting
        kept.cancel()
        await router.until_idle()
        gate.let_go.set()
        row = (await router.client.get("/v1/usage", headers=ADMIN)).json()["data"]
        assert sum(each["refused"] for each in row) == 10
        assert sum(each["requests"] for each in row) == 0
        listed = await router.client.get("/v1/usage/requests", headers=ADMIN)
        assert [each["outcome"] for each in listed.json()["data"]] == ["refused"]
        assert await router.metric("loraplex_generations_refused_total") == 10
        plain = await complete(router, key)
        assert plain.status_code == 200, "its place came back"
        assert plain.headers["x-ratelimit-remaining-requests"] == "0", "one was worked on"


async def test_vectors_and_batches_take_their_places_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, gate = FakeWorker(), Gate()
    cold_adapters(worker, gate, monkeypatch)
    async with running_worker(worker), keyed(tmp_path, worker) as router:
        key = await create(router, id="l", limits={"concurrency": 1})
        first = asyncio.create_task(complete(router, key, model="pirate"))

        async def begun() -> bool:
            return gate.begun == 1

        await poll(begun)
        body = {"model": BASE_NAME, "input": "x"}
        line = {"Authorization": router.service.tenancy.vouchers.header("default", "l")}
        for headers in (bearer(key), line):
            refused = await router.client.post("/v1/embeddings", json=body, headers=headers)
            assert refused.status_code == 429, refused.text
        first.cancel()
        await router.until_idle()
        gate.let_go.set()


async def test_tokens_are_taken_when_they_are_known(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        limits = {"tokens_per_minute": 100, "requests_per_minute": 9, "concurrency": 1}
        key = await create(router, id="l", limits=limits)
        first = await complete(router, key, prompt="x" * 60, max_tokens=40)
        assert first.headers["x-ratelimit-remaining-tokens"] == "0"
        assert first.headers["x-ratelimit-remaining-requests"] == "8"
        for tokens, left in ((90, "7"), (90, "6")):
            refused = await complete(router, key, prompt="x" * tokens)
            assert (refused.status_code, "tokens a minute" in refused.text) == (429, True)
            assert refused.headers["x-ratelimit-remaining-requests"] == left
        await router.until_idle()


async def test_no_tenant_takes_the_room_of_all(tmp_path: Path) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    async with running_worker(worker), keyed(tmp_path, worker, max_requests=8) as router:
        greedy = await create(router, tenant="greedy")
        other = await create(router, tenant="other")
        asking = [asyncio.create_task(complete(router, greedy)) for _ in range(6)]
        await worker.until(lambda: len(worker.requests) == 6)
        refused = await complete(router, greedy)
        assert (refused.status_code, "of this tenant" in refused.text) == (429, True)
        counted = await router.client.post(
            "/tokenize", json={"model": BASE_NAME, "prompt": "x"}, headers=bearer(greedy)
        )
        assert counted.status_code == 429, "counting tokens is work, too"
        asking += [asyncio.create_task(complete(router, other)) for _ in range(2)]
        await worker.until(lambda: len(worker.requests) == 8)
        assert (await complete(router, other)).status_code == 429
        gate.set()
        answers = await asyncio.gather(*asking)
        assert Counter(answer.status_code for answer in answers) == {200: 8}
        await router.until_idle()
        assert (await complete(router, greedy)).status_code == 200


async def test_callers_without_keys_share_all_of_the_room(tmp_path: Path) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    async with (
        running_worker(worker),
        keyed(tmp_path, worker, auth="none", max_requests=4) as router,
    ):
        asking = [asyncio.create_task(complete(router, "none")) for _ in range(4)]
        await worker.until(lambda: len(worker.requests) == 4)
        gate.set()
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
