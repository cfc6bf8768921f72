"""What --adapter declares is tried in the background: reported soon, and nothing waits for it."""

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError, AdapterErrorCode, invalid
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef
from loraplex.router.operations import admin
from loraplex.router.operations.admin import CHECKED_AT_ONCE, pause_after
from loraplex.server.protocol import AdapterLoad
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.serving import Running, poll, running_router

# Name -> what the worker or the Hub answers for hub:org/<name>, and the words that must be
# reported.
REASONS: dict[str, tuple[AdapterError | None, str]] = {
    "missing": (None, "no repository org/missing"),
    "private": (None, "org/private is private"),
    "down": (None, "the Hub does not answer"),
    "qalora": (
        invalid("unsupported_feature", "use_qalora", "use_qalora=True changes the maths"),
        "qalora",
    ),
    "base": (invalid("wrong_base", "base", "the adapter was trained for 'x'"), "trained for 'x'"),
    "large": (AdapterError("too_large", "the adapter has 9 bytes; at most 1"), "at most 1"),
    "full": (AdapterError("unavailable", "the disk is full", (), 30.0), "the disk is full"),
    "closed": (AdapterError("forbidden", "adapters from 's3' are not enabled"), "not enabled"),
}
DECLARED = tuple(f"{name}=hub:org/{name}" for name in (*REASONS, "good"))


async def load(order: AdapterLoad) -> AdapterManifest:
    error, _ = REASONS.get(order.ref.name.removeprefix("org/"), (None, ""))
    if error is not None:
        raise AdapterError(error.code, error.message, error.violations, error.retry_after_s)
    return make_manifest(order.ref.name)


async def listed(router: Running) -> dict[str, dict[str, Any]]:
    told = (await router.client.get("/v1/adapters")).json()["data"]
    return {one["id"]: one for one in told}


async def settled(router: Running) -> dict[str, dict[str, Any]]:
    """Once something is known of each."""
    for name in await listed(router):
        await settled_of(router, name)
    return await listed(router)


async def settled_of(router: Running, name: str) -> dict[str, Any]:
    async def known() -> bool:
        one = (await listed(router))[name]
        return bool(one["digest"] or one["error"])

    await poll(known)
    return (await listed(router))[name]


async def test_a_reason_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "loraplex.router.names.catalog")
    worker = FakeWorker()
    worker.loader = load
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, adapters=DECLARED, check_adapters="start") as router,
    ):
        shown = await settled(router)
        for name, (_, words) in REASONS.items():
            assert shown[name]["state"] == "broken", shown[name]
            assert words in shown[name]["error"]
            assert [m for m in caplog.messages if m.startswith(f"adapter {name} cannot")] == [
                f"adapter {name} cannot be loaded: {shown[name]['error']}"
            ]
        assert (shown["good"]["error"], shown["good"]["ranks"]) == (None, [8])
        assert len(caplog.messages) == len(REASONS)
        models = (await router.client.get("/v1/models")).json()["data"]
        assert {one["id"] for one in models} == {"fake-base", "good"}
        assert await router.metric('loraplex_adapters_broken{origin="option"}') == len(REASONS)
        assert await router.metric("loraplex_adapters_registered") == 1
        assert not worker.orders, "nothing comes to a device for it"
        fleet = (await router.client.get("/v1/fleet")).json()["adapters"]
        assert {one["name"] for one in fleet if one["error"]} == REASONS.keys()


async def test_nobody_waits(tmp_path: Path) -> None:
    """However many are declared, and however long their source takes."""
    gate, at_once = asyncio.Event(), 0
    running: Counter[str] = Counter()

    async def slowly(order: AdapterLoad) -> AdapterManifest:
        nonlocal at_once
        if order.ref.name.startswith("org/slow"):
            running[order.ref.name] += 1
            at_once = max(at_once, running.total())
            await gate.wait()
            running[order.ref.name] -= 1
        return make_manifest(order.ref.name)

    worker = FakeWorker()
    worker.loader = slowly
    names = [f"slow{number}" for number in range(20)]
    declared = tuple(f"{name}=hub:org/{name}" for name in names)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, adapters=declared, check_adapters="start") as router,
    ):
        await worker.until(lambda: len(worker.loads) == CHECKED_AT_ONCE)
        for model in ("org/other", "fake-base"):
            body = {"model": model, "prompt": "x"}
            assert (await router.client.post("/v1/completions", json=body)).status_code == 200
        assert len(worker.loads) == CHECKED_AT_ONCE + 1
        gate.set()
        shown = await settled(router)
        assert all(shown[name]["digest"] for name in names)
        assert at_once == CHECKED_AT_ONCE
        assert len(worker.loads) == len(names) + 1


async def test_an_adapter_that_is_back_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "pause_after", lambda error, attempt: 0.01)
    caplog.set_level(logging.INFO, "loraplex.router.names.catalog")
    back = asyncio.Event()

    async def later(order: AdapterLoad) -> AdapterManifest:
        if not back.is_set():
            raise AdapterError("unavailable", "the disk is full")
        return make_manifest(order.ref.name)

    worker = FakeWorker()
    worker.loader = later
    async with (
        running_worker(worker),
        running_router(
            tmp_path, worker, adapters=("one=hub:org/one",), check_adapters="start"
        ) as router,
    ):
        assert (await settled(router))["one"]["error"] == "the disk is full"
        await worker.until(lambda: len(worker.loads) > 2)
        back.set()

        async def there() -> bool:
            return (await listed(router))["one"]["error"] is None

        await poll(there)
        assert (await listed(router))["one"]["digest"] == make_manifest("org/one").digest
    assert caplog.messages == [
        "adapter one cannot be loaded: the disk is full",
        "adapter one can be loaded now",
    ]


async def test_it_begins_when_there_is_a_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That none is there yet is no reason against an adapter."""
    caplog.set_level(logging.WARNING, "loraplex.router.names.catalog")
    names = ("one=hub:org/one", "gone=hub:org/missing")
    async with running_worker(FakeWorker()) as worker:
        worker.ready = False
        async with running_router(
            tmp_path, worker, wait=False, adapters=names, check_adapters="start"
        ) as router:
            gone = (await settled_of(router, "gone"))["error"]
            assert "no repository org/missing" in gone, "its source needs no worker"
            assert not worker.loads
            await worker.announce(ready=True)
            assert (await settled_of(router, "one"))["digest"]
    assert caplog.messages == [f"adapter gone cannot be loaded: {gone}"]


async def test_it_can_be_left_to_requests(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, adapters=DECLARED, check_adapters="use") as router,
    ):
        body = {"model": "good", "prompt": "x"}
        assert (await router.client.post("/v1/completions", json=body)).status_code == 200
        assert [order.ref for order in worker.loads] == [
            AdapterRef("hub", "org/good", worker.loads[0].ref.revision)
        ]


CODES: tuple[AdapterErrorCode, ...] = ("unavailable", "not_found", "unauthorized", "forbidden")


@given(st.sampled_from(CODES), st.none() | st.floats(0, 1e9), st.integers(0, 10_000))
def test_pauses_grow_within_bounds(
    code: AdapterErrorCode, retry_after_s: float | None, attempt: int
) -> None:
    error = AdapterError(code, "no", (), retry_after_s)
    pauses = [pause_after(error, n) for n in (attempt, attempt + 1)]
    assert all(pause is not None and 5.0 <= pause <= 600.0 for pause in pauses)
    assert pauses == sorted(p for p in pauses if p is not None)
    assert pauses[0] is not None
    assert pauses[0] >= min(600.0, retry_after_s or 0.0)


@pytest.mark.parametrize("code", ["invalid", "too_large", "bad_ref", "gone", "conflict"])
def test_what_was_judged_is_not_fetched_again(code: AdapterErrorCode) -> None:
    assert pause_after(AdapterError(code, "no"), 0) is None
