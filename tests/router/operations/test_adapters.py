"""From an adapter's name to a digest on the right worker, for the right caller."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.errors import AdapterError, AdapterErrorCode, Violation
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef
from loraplex.server.protocol import AdapterLoad, ErrorCode, GenerateRequest
from tests.router.fake_worker import BASE_NAME, FakeWorker, make_manifest, running_worker
from tests.router.serving import COMMIT, Running, poll, running_router


async def generate(router: Running, adapter_id: str, **parameters: Any) -> httpx.Response:
    body = {"inputs": "x", "parameters": {"adapter_id": adapter_id, **parameters}}
    return await router.client.post("/generate", json=body)


async def test_a_hub_adapter_is_pinned_and_loaded(router: Running, worker: FakeWorker) -> None:
    answer = await generate(router, "org/one@main", api_token="t")
    assert answer.status_code == 200
    assert worker.loads[0].ref == AdapterRef("hub", "org/one", COMMIT)
    assert worker.loads[0].token == "t"
    assert worker.requests[0].adapter == make_manifest("org/one").digest
    assert answer.headers["x-loraplex-adapter-digest"] == make_manifest("org/one").digest


async def test_a_local_adapter_goes_to_the_worker_as_it_is(
    router: Running, worker: FakeWorker
) -> None:
    assert (await generate(router, "local:/srv/one", api_token="t")).status_code == 200
    assert worker.loads[0].ref == AdapterRef("local", "/srv/one")
    assert worker.loads[0].token is None
    assert not router.hub.calls


async def test_a_registered_name_never_means_the_base(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, adapters=(f"{BASE_NAME}=hub:org/one",)) as router,
    ):
        assert (await generate(router, BASE_NAME)).status_code == 200
        await router.client.post("/v1/completions", json={"model": BASE_NAME, "prompt": "x"})
        digest = make_manifest("org/one").digest
        assert [request.adapter for request in worker.requests] == [digest, digest]


async def test_many_requests_for_a_cold_adapter_load_it_once(
    router: Running, worker: FakeWorker
) -> None:
    release = asyncio.Event()

    async def load(load: AdapterLoad) -> AdapterManifest:
        await release.wait()
        return make_manifest(load.ref.name)

    worker.loader = load
    asking = [asyncio.create_task(generate(router, "org/cold")) for _ in range(50)]
    await worker.until(lambda: len(worker.loads) == 1)
    release.set()
    answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {200}
    assert len(worker.loads) == 1
    assert len(router.hub.calls) == 1


async def test_many_requests_share_a_failure(router: Running, worker: FakeWorker) -> None:
    violation = Violation("rank_mismatch", "q_proj", "expected rank 8, got 9")
    release = asyncio.Event()

    async def load(load: AdapterLoad) -> AdapterManifest:
        await release.wait()
        raise AdapterError("invalid", "the adapter is invalid", (violation,))

    worker.loader = load
    asking = [asyncio.create_task(generate(router, "org/broken")) for _ in range(20)]
    await worker.until(lambda: len(worker.loads) == 1)
    release.set()
    for answer in await asyncio.gather(*asking):
        assert answer.status_code == 422
        assert answer.json()["error_type"] == "adapter_invalid"
        assert "expected rank 8, got 9" in answer.text
    # Remembered for a while: the next caller causes no other load.
    assert (await generate(router, "org/broken")).status_code == 422
    assert len(worker.loads) == 1


async def test_a_passing_failure_is_not_remembered(router: Running, worker: FakeWorker) -> None:
    outcomes = [AdapterError("unavailable", "the disk is full", (), 7.0), None]

    async def load(load: AdapterLoad) -> AdapterManifest:
        failure = outcomes.pop(0)
        if failure is not None:
            raise failure
        return make_manifest(load.ref.name)

    worker.loader = load
    answer = await generate(router, "org/later")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert (await generate(router, "org/later")).status_code == 200


@pytest.mark.parametrize("code", ["invalid", "unavailable"])
async def test_operators_see_registered_adapters_that_fail(
    code: AdapterErrorCode,
    router: Running,
    worker: FakeWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def error() -> str | None:
        told: str | None = (await router.client.get("/v1/adapters/pirate")).json()["error"]
        return told

    async def load(load: AdapterLoad) -> AdapterManifest:
        raise AdapterError(code, "its weights are gone")

    loader, worker.loader = worker.loader, load
    answers = await asyncio.gather(*(generate(router, "pirate") for _ in range(5)))
    answers.append(await generate(router, "pirate"))
    assert {answer.status_code for answer in answers} == {422 if code == "invalid" else 503}
    assert await error() == "its weights are gone"
    warnings = [one.message for one in caplog.records if "adapter pirate" in one.message]
    assert warnings == ["adapter pirate cannot be loaded: its weights are gone"]
    worker.loader = loader
    body = {"name": "pirate", "ref": "org/pirate"}
    if code == "invalid":  # which is remembered for a while; who registers it asks anew
        assert (await router.client.post("/v1/adapters", json=body)).status_code == 200
    assert (await generate(router, "pirate")).status_code == 200
    assert await error() is None


async def test_what_a_caller_may_not_open_is_not_the_adapters_fault(
    tmp_path: Path, worker: FakeWorker
) -> None:
    async with running_router(tmp_path, worker, adapters=("mine=hub:org/private",)) as router:

        async def error() -> str | None:
            told: str | None = (await router.client.get("/v1/adapters/mine")).json()["error"]
            return told

        assert (await generate(router, "mine", api_token="wrong")).status_code == 401
        assert await error() is None
        assert (await generate(router, "mine")).status_code == 401
        assert await error() == "org/private is private"
        assert (await generate(router, "mine", api_token="let-me-in")).status_code == 200
        assert await error() is None


@pytest.mark.parametrize(
    ("adapter_id", "status", "error_type"),
    [
        ("org/missing", 404, "adapter_not_found"),
        ("org/private", 401, "unauthorized"),
        ("org/down", 503, "unavailable"),
        ("local:missing", 404, "adapter_not_found"),
        ("nobody-registered-this", 404, "adapter_not_found"),
        ("bad name", 422, "validation"),
    ],
)
async def test_failures(router: Running, adapter_id: str, status: int, error_type: str) -> None:
    answer = await generate(router, adapter_id)
    assert (answer.status_code, answer.json()["error_type"]) == (status, error_type)
    if status == 503:
        assert answer.headers["retry-after"]


async def test_one_callers_token_opens_nothing_for_another(
    router: Running, worker: FakeWorker
) -> None:
    assert (await generate(router, "org/private", api_token="let-me-in")).status_code == 200
    assert (await generate(router, "org/private")).status_code == 401
    assert (await generate(router, "org/private", api_token="wrong")).status_code == 401
    headers = {"authorization": "Bearer hf_wrong"}
    body = {"model": "org/private", "prompt": "x"}
    answer = await router.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 401
    assert len(worker.requests) == 1


async def test_the_operators_token_opens_registered_adapters_only(tmp_path: Path) -> None:
    options: dict[str, Any] = {"adapters": ("mine=hub:org/private",), "hub_token": "let-me-in"}
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, **options) as router,
    ):
        assert (await generate(router, "mine")).status_code == 200
        assert (await generate(router, "org/private")).status_code == 401
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, **options, share_hub_token=True) as router,
    ):
        assert (await generate(router, "org/private")).status_code == 200


async def test_owners_outside_the_list_are_refused(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, hub_owners=("good",)) as router,
    ):
        assert (await generate(router, "good/one")).status_code == 200
        answer = await generate(router, "evil/one")
        assert (answer.status_code, answer.json()["error_type"]) == (403, "forbidden")
        assert [ref.name for ref, _ in router.hub.calls] == ["good/one"]


async def test_every_request_is_authorised_again_after_the_ttl(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, adapter_ttl_s=0.0) as router,
    ):
        for _ in range(2):
            assert (await generate(router, "org/one")).status_code == 200
        assert len(router.hub.calls) == 2


async def test_a_worker_that_lost_an_adapter_loads_it_again(
    router: Running, worker: FakeWorker
) -> None:
    assert (await generate(router, "org/one")).status_code == 200
    worker.forget_adapters()
    answer = await generate(router, "org/one")
    assert answer.status_code == 200
    assert len(router.hub.calls) == 1
    again = worker.loads[1]
    assert again.expected_digest == make_manifest("org/one").digest
    assert again.ref == worker.loads[0].ref


async def test_the_chosen_worker_loads_it_before_the_request(tmp_path: Path) -> None:
    """A name is resolved through one worker; the sequence goes to the one with room."""
    first, second = FakeWorker(worker_id="a"), FakeWorker(worker_id="b")
    first.credits = second.credits = 1
    gate = asyncio.Event()

    async def hold(*_: object) -> None:
        await gate.wait()

    first.before_token = second.before_token = hold
    async with (
        running_worker(first),
        running_worker(second),
        running_router(tmp_path, first, second) as router,
    ):
        await first.until(lambda: first.connected)
        await second.until(lambda: second.connected)
        asking = [asyncio.create_task(generate(router, "org/one")) for _ in range(2)]
        await first.until(lambda: len(first.requests) == 1)
        await second.until(lambda: len(second.requests) == 1)
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert {w.requests[0].adapter for w in (first, second)} == {make_manifest("org/one").digest}
        expected = sorted(
            len(w.loads) and w.loads[0].expected_digest is None for w in (first, second)
        )
        assert expected == [False, True]


async def no_room(load: AdapterLoad) -> AdapterManifest:
    raise AdapterError("unavailable", "the disk has no room", (), 1.0)


async def test_what_one_worker_cannot_get_another_gets(tmp_path: Path) -> None:
    """Whichever of them is an adapter's home."""
    full, sound = FakeWorker(worker_id="full"), FakeWorker(worker_id="sound")
    full.loader = no_room
    async with (
        running_worker(full),
        running_worker(sound),
        running_router(tmp_path, full, sound) as router,
    ):
        await full.until(lambda: full.connected)
        await sound.until(lambda: sound.connected)
        for number in range(12):
            assert (await generate(router, f"org/a{number}")).status_code == 200
        assert full.loads, "some have their home there"
        assert not full.requests
        sound.loader = no_room
        refused = await generate(router, "org/b")
        assert (refused.status_code, "no room" in refused.text) == (503, True)


async def test_a_stream_waits_for_the_worker_that_can_get_its_adapter(tmp_path: Path) -> None:
    """Its engine is lost, and the only other worker has no room for the adapter."""
    full, sound = FakeWorker(worker_id="full"), FakeWorker(worker_id="sound")
    full.loader = no_room

    async def lose_once(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if request.attempt == 0 and index == 5:
            await worker.announce(ready=False)
            return "engine_lost"
        return None

    sound.before_token = lose_once
    async with (
        running_worker(full),
        running_worker(sound),
        running_router(tmp_path, full, sound) as router,
    ):
        asking = asyncio.create_task(generate(router, "org/one"))
        await full.until(lambda: bool(full.loads) and len(sound.requests) == 1)

        async def waits() -> bool:
            return len(router.service.bases.first.fleet.queue) == 1

        await poll(waits)
        await sound.announce(ready=True)
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert [len(request.accepted_ids) for request in sound.requests] == [0, 5]
        assert not full.requests


async def test_content_that_changed_is_resolved_anew(router: Running, worker: FakeWorker) -> None:
    """A folder is another one when a worker comes back and has to fetch it once more."""
    content = "old"

    async def load(load: AdapterLoad) -> AdapterManifest:
        manifest = make_manifest(content)
        if load.expected_digest not in (None, manifest.digest):
            mismatch = Violation("digest_mismatch", "one", "expected other content")
            raise AdapterError("invalid", "not what was expected", (mismatch,))
        return manifest

    worker.loader = load
    assert (await generate(router, "local:one")).status_code == 200
    content = "new"
    worker.forget_adapters()
    worker.drop_connections()
    await worker.until(lambda: not worker.connected)
    await worker.until(lambda: worker.connected)
    await router.until_ready()
    refused = await generate(router, "local:one")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    again = await generate(router, "local:one")
    assert again.status_code == 200
    assert again.headers["x-loraplex-adapter-digest"] == make_manifest("new").digest


async def test_loads_wait_no_longer_than_allowed(tmp_path: Path) -> None:
    async def never(load: AdapterLoad) -> AdapterManifest:
        await asyncio.Event().wait()
        raise AssertionError

    worker = FakeWorker()
    worker.loader = never
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, adapter_timeout_s=0.05) as router,
    ):
        answer = await generate(router, "org/slow")
        assert (answer.status_code, answer.json()["error_type"]) == (503, "unavailable")
        await router.until_idle()


async def test_a_worker_lost_while_it_loads(router: Running, worker: FakeWorker) -> None:
    async def load(load: AdapterLoad) -> AdapterManifest:
        if len(worker.loads) == 1:
            worker.drop_connections()
        return make_manifest(load.ref.name)

    worker.loader = load
    answer = await generate(router, "org/one")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    await router.until_ready()
    assert (await generate(router, "org/one")).status_code == 200


async def test_tokens_show_nowhere(
    router: Running, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answers = [
        await generate(router, name, api_token="hf_verysecret")
        for name in ("org/one", "org/missing", "org/private", "local:x")
    ]
    metrics = (await router.client.get("/metrics")).text
    shown = "".join([*(str(a.headers) + a.text for a in answers), metrics])
    assert "verysecret" not in shown
    ours = [r.getMessage() for r in caplog.records if r.name != "websockets.server"]
    assert "verysecret" not in "".join(ours)
