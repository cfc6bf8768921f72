"""Who may use an adapter is asked of its source: for each caller, and again within a minute."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef, parse_ref
from loraplex.adapters.sources.hub import HubSource
from loraplex.router.call import AdapterChoice, MergedChoice, Secret
from loraplex.router.config import MAX_ADAPTER_TTL_S
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.catalog import Catalog, CatalogRules
from loraplex.router.names.served import Origin
from loraplex.router.shared.memory_store import MemoryStore
from tests.adapters.stub_hub import StubHub, running_hub
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.serving import Running, running_router

TOKEN, OTHER = "hf_granted", "hf_other"
TTL_S = 30.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StubHub]:
    with running_hub() as stub:
        folder = tmp_path / "published"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        stub.publish("org/private", folder, token=TOKEN)
        stub.publish("org/gated", folder, gated=True, granted=frozenset({TOKEN}))
        stub.publish("org/public", folder)
        yield stub


def revoke(hub: StubHub) -> None:
    hub.repos["org/private"].token = "hf_nobody"
    hub.repos["org/gated"].granted = frozenset()


class Clocked:
    """A catalog on the real Hub source, with time in our hands. load_s: what a load takes."""

    def __init__(self, hub: StubHub) -> None:
        self.now = 1000.0
        self.load_s = 0.0
        self.loads = 0
        self.during_load: Callable[[], None] = lambda: None
        source = HubSource(hub.endpoint)
        rules = CatalogRules(Aliases(MemoryStore(lambda: 0.0), False), (), None, False, TTL_S, 60.0)

        async def pin(ref: AdapterRef, token: Secret | None) -> AdapterRef:
            return await asyncio.to_thread(source.resolve, ref, token)

        self.catalog = Catalog(rules, pin, self._load, lambda: self.now, lambda: 0.0)

    async def _load(
        self, origin: Origin, token: Secret | None, base: str
    ) -> tuple[AdapterManifest, str]:
        self.loads += 1
        self.now += self.load_s
        self.during_load()
        name = "merged" if not isinstance(origin, AdapterRef) else origin.name
        return make_manifest(name), base

    async def ask(self, name: str, token: str | None) -> str:
        """Its digest, or the code of the refusal."""
        return await self._outcome(choice(name, token))

    async def ask_merged(self, names: list[str], token: str) -> str:
        members = tuple(choice(name, token) for name in names)
        weights = tuple(1.0 for _ in names)
        merged = MergedChoice(members, weights, "linear", 0.0, "total")
        return await self._outcome(merged)

    async def _outcome(self, wanted: AdapterChoice | MergedChoice) -> str:
        try:
            return (await self.catalog.resolve(wanted)).digest
        except AdapterError as error:
            return error.code


def choice(name: str, token: str | None) -> AdapterChoice:
    return AdapterChoice(name, parse_ref(name), Secret(token) if token else None)


@pytest.mark.parametrize("name", ["org/private", "org/gated"])
async def test_a_revocation_holds_after_the_ttl(name: str, hub: StubHub) -> None:
    clocked = Clocked(hub)
    digest = make_manifest(name).digest
    assert await clocked.ask(name, TOKEN) == digest
    asked = hub.requests.total()
    revoke(hub)
    clocked.now += TTL_S - 1
    assert await clocked.ask(name, TOKEN) == digest
    assert hub.requests.total() == asked, "within the TTL nobody is asked"
    clocked.now += 1
    assert await clocked.ask(name, TOKEN) in ("unauthorized", "forbidden")


@pytest.mark.parametrize("name", ["org/private", "org/gated"])
async def test_the_ttl_runs_from_the_proof_not_from_the_load(name: str, hub: StubHub) -> None:
    clocked = Clocked(hub)
    clocked.load_s = TTL_S - 1
    assert await clocked.ask(name, TOKEN) == make_manifest(name).digest
    revoke(hub)
    clocked.now += 2
    assert await clocked.ask(name, TOKEN) in ("unauthorized", "forbidden")


@pytest.mark.parametrize("name", ["org/private", "org/gated"])
async def test_revoked_during_a_long_load(name: str, hub: StubHub) -> None:
    clocked = Clocked(hub)
    clocked.load_s = MAX_ADAPTER_TTL_S + 1
    clocked.during_load = lambda: revoke(hub)
    assert await clocked.ask(name, TOKEN) in ("unauthorized", "forbidden")
    assert clocked.loads == 1


async def test_revoked_during_a_long_merge(hub: StubHub) -> None:
    clocked = Clocked(hub)
    names = ["org/private", "org/public"]
    assert await clocked.ask_merged(names, TOKEN) == make_manifest("merged").digest
    clocked.now += TTL_S
    clocked.load_s = MAX_ADAPTER_TTL_S + 1
    loads = clocked.loads

    def late() -> None:
        if clocked.loads > loads + len(names):
            revoke(hub)

    clocked.during_load = late
    assert await clocked.ask_merged(names, TOKEN) == "unauthorized"


async def test_what_is_private_looks_like_what_is_not_there(hub: StubHub) -> None:
    """Also when another caller has brought it here: in status, text and headers."""
    async with served(hub) as (router, _):
        assert (await generate(router, "org/private", TOKEN)).status_code == 200
        for token in (None, OTHER):
            private, nowhere = [
                [
                    said(await router.client.post(path, json=body, headers=bearer(token)), name)
                    for path, body in bodies(name)
                ]
                for name in ("org/private", "org/nowhere")
            ]
            assert private == nowhere
            assert {text[:4] for text in private} <= {"401 ", "404 "}, private
        models = (await router.client.get("/v1/models")).text
        info = (await router.client.get("/info")).text
        metrics = (await router.client.get("/metrics")).text
        assert "org/private" not in models + info + metrics
        assert (await router.client.get("/v1/models/org%2Fprivate")).status_code == 404


async def test_running_requests_finish_and_new_ones_are_refused(hub: StubHub) -> None:
    async with served(hub, adapter_ttl_s=0.0) as (router, worker):
        release = asyncio.Event()

        async def hold(*_: object) -> None:
            await release.wait()

        worker.before_token = hold
        running = asyncio.create_task(generate(router, "org/private", TOKEN))
        await worker.until(lambda: len(worker.requests) == 1)
        revoke(hub)
        assert (await generate(router, "org/private", TOKEN)).status_code == 401
        release.set()
        assert (await running).status_code == 200
        assert len(worker.requests) == 1


@asynccontextmanager
async def served(hub: StubHub, **options: Any) -> AsyncIterator[tuple[Running, FakeWorker]]:
    """A router on the real Hub source, before a worker that has all that it is asked to load."""
    with tempfile.TemporaryDirectory() as cache:
        async with (
            running_worker(FakeWorker()) as worker,
            running_router(
                Path(cache), worker, real_hub=HubSource(hub.endpoint), **options
            ) as router,
        ):
            yield router, worker


def bodies(name: str) -> list[tuple[str, dict[str, Any]]]:
    """One for each way to name an adapter."""
    messages = [{"role": "user", "content": "x"}]
    merged = {"ids": [name, name], "weights": [0.5, 0.25]}
    return [
        ("/generate", {"inputs": "x", "parameters": {"adapter_id": name}}),
        ("/generate_stream", {"inputs": "x", "parameters": {"adapter_id": name}}),
        ("/generate", {"inputs": "x", "parameters": {"merged_adapters": merged}}),
        ("/v1/completions", {"model": name, "prompt": "x"}),
        ("/v1/completions", {"model": name, "prompt": "x", "stream": True, "n": 2}),
        ("/v1/chat/completions", {"model": name, "messages": messages}),
        ("/v1/messages", {"model": name, "messages": messages, "max_tokens": 16}),
        ("/v1/messages/count_tokens", {"model": name, "messages": messages}),
    ]


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def said(answer: httpx.Response, name: str) -> str:
    """All that a caller can see, without what differs from request to request."""
    kept = {k: v for k, v in answer.headers.items() if k not in ("x-request-id", "date")}
    kept.pop("content-length", None)
    told = f"{answer.status_code} {answer.text} {kept}".replace(name, "NAME")
    return told.replace(answer.headers["x-request-id"], "ID")


async def generate(router: Running, name: str, token: str) -> httpx.Response:
    body = {"inputs": "x", "parameters": {"adapter_id": name, "api_token": token}}
    return await router.client.post("/generate", json=body)
