"""Two tenants with one name, over HTTP: each one's answers, the operator's actions, the reports."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.http import idempotency
from loraplex.router.names.served import OwnedName
from loraplex.router.shared import memory_store
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import EOS, FakeWorker, make_manifest
from tests.router.routes.test_keys import ADMIN, bearer, create, keyed
from tests.router.serving import Running, poll
from tests.router.shared.redis_server import running_redis
from tests.router.telemetry.test_metrics import series

DIGEST = "x-loraplex-adapter-digest"
TENANTS = ("acme", "globex")


def digest(repository: str) -> str:
    return make_manifest(f"org/{repository}").digest


async def call(router: Running, method: str, path: str, **body: Any) -> httpx.Response:
    address = f"/v1/adapters{path}"
    return await router.client.request(method, address, json=body or None, headers=ADMIN)


async def done(router: Running, method: str, path: str, **body: Any) -> Any:
    answer = await call(router, method, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ask(router: Running, key: str, name: str = "bot", **more: Any) -> httpx.Response:
    body = {"model": name, "prompt": "x", "max_tokens": 4, **more}
    return await router.client.post("/v1/completions", json=body, headers=bearer(key))


async def got(router: Running, key: str, name: str = "bot") -> str:
    """The digest, or the status."""
    answer = await ask(router, key, name)
    return answer.headers[DIGEST] if answer.status_code == 200 else str(answer.status_code)


class Shared:
    """A router where acme and globex both own the name `bot`; `acme`… are keys of theirs."""

    def __init__(self, router: Running, keys: dict[str, str]) -> None:
        self.router = router
        self.acme, self.globex, self.other = (keys[name] for name in (*TENANTS, "other"))

    async def all_get(self) -> list[str]:
        return [await got(self.router, key) for key in (self.acme, self.globex, self.other)]


@pytest.fixture
async def shared(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Shared]:
    async with keyed(tmp_path, worker, metrics_compat=True) as router:
        keys = {name: await create(router, id=name, tenant=name) for name in (*TENANTS, "other")}
        for tenant in TENANTS:
            shown = await done(
                router, "POST", "", name="bot", ref=f"hub:org/{tenant}", tenant=tenant
            )
            assert (shown["id"], shown["tenant"]) == ("bot", tenant)
        yield Shared(router, keys)


async def models(router: Running, key: str) -> list[str]:
    answer = await router.client.get("/v1/models", headers=bearer(key))
    return [model["id"] for model in answer.json()["data"]]


async def test_each_gets_its_own_and_nobody_else_any(shared: Shared) -> None:
    router = shared.router
    assert await shared.all_get() == [digest("acme"), digest("globex"), "404"]
    assert await models(router, shared.acme) == ["fake-base", "bot", "pirate"]
    assert await models(router, shared.other) == ["fake-base", "pirate"]
    assert (await router.client.get("/info", headers=bearer(shared.other))).json()["adapters"] == [
        "pirate"
    ]
    one = await router.client.get("/v1/models/bot", headers=bearer(shared.acme))
    none = await router.client.get("/v1/models/bot", headers=bearer(shared.other))
    assert (one.status_code, none.status_code) == (200, 404)
    await done(router, "POST", "", name="bot", ref="hub:org/fleet")
    assert await shared.all_get() == [digest("acme"), digest("globex"), digest("fleet")]
    assert await models(router, shared.acme) == ["fake-base", "bot", "pirate"], "once"


async def test_anothers_name_looks_like_one_that_is_not_there(shared: Shared) -> None:
    """In every API, in status, text and headers, however it is spelled, with any key."""
    messages = [{"role": "user", "content": "x"}]
    for models in (["*"], ["bot"], ["nobody-s"]):
        key = await create(shared.router, tenant="other", models=models)

        def bodies(name: str) -> list[tuple[str, dict[str, Any]]]:
            merged = {"ids": [name, "pirate"], "weights": [0.5, 0.5]}
            return [
                ("/generate", {"inputs": "x", "parameters": {"adapter_id": name}}),
                ("/generate_stream", {"inputs": "x", "parameters": {"adapter_id": name}}),
                ("/generate", {"inputs": "x", "parameters": {"merged_adapters": merged}}),
                ("/v1/chat/completions", {"model": name, "messages": messages}),
                ("/v1/completions", {"model": name, "prompt": "x", "stream": True}),
                ("/tokenize", {"model": name, "messages": messages}),
                ("/tokenize", {"model": name, "prompt": "x"}),
                ("/detokenize", {"model": name, "tokens": [1]}),
            ]

        async def said(name: str, key: str = key) -> list[str]:
            texts = []
            for path, body in bodies(name):
                answer = await shared.router.client.post(path, json=body, headers=bearer(key))
                assert answer.status_code >= 400
                kept = {
                    k: v for k, v in answer.headers.items() if k not in ("x-request-id", "date")
                }
                texts.append(f"{answer.status_code} {answer.text} {kept}".replace(name, "NAME"))
            return texts

        if models == ["*"]:
            assert await said("bot") == await said("bat")
        assert await said("acme::bot") == await said("acme::bat")


async def test_what_is_done_to_one_is_not_done_to_the_other(
    shared: Shared, worker: FakeWorker
) -> None:
    router = shared.router
    pinned = await done(router, "POST", "/bot/pin?tenant=acme")
    assert pinned["pinned"]
    assert not (await done(router, "GET", "/bot?tenant=globex"))["pinned"]
    await worker.until(lambda: worker.pins == {digest("acme")})
    await done(router, "POST", "", name="bot", ref="org/acme-2", tenant="acme", replace=True)
    assert await shared.all_get() == [digest("acme-2"), digest("globex"), "404"]
    told = (await done(router, "GET", "/bot/history?tenant=acme"))["data"]
    assert [change["digest"] for change in told] == [digest("acme-2"), digest("acme")]
    told = await done(router, "GET", "/bot/history?tenant=globex")
    assert (told["id"], told["tenant"], len(told["data"])) == ("bot", "globex", 1)
    assert (await call(router, "POST", "/bot/unload?tenant=acme")).status_code == 200
    assert await shared.all_get() == ["409", digest("globex"), "404"]
    await done(router, "POST", "/bot/load?tenant=acme")
    deleted = await done(router, "DELETE", "/bot?tenant=acme")
    assert (deleted["id"], deleted["tenant"]) == ("bot", "acme")
    assert await shared.all_get() == ["410", digest("globex"), "404"]
    for method, path in (("GET", "/bot"), ("DELETE", "/bot"), ("POST", "/bot/load")):
        assert (await call(router, method, path)).status_code == 404, "the fleet has none"


async def test_unloading_waits_for_its_own_requests_only(
    shared: Shared, worker: FakeWorker
) -> None:
    """Also where both names mean the same content."""
    router, gate = shared.router, asyncio.Event()
    await done(router, "POST", "", name="bot", ref="org/globex", tenant="acme", replace=True)

    async def hold(*_: object) -> None:
        await gate.wait()

    worker.before_token = hold
    running = asyncio.create_task(ask(router, shared.globex))
    await worker.until(lambda: len(worker.requests) == 1)
    shown = [await done(router, "GET", f"/bot?tenant={tenant}") for tenant in TENANTS]
    assert [one["running"] for one in shown] == [0, 1]
    unloaded = await call(router, "POST", "/bot/unload?tenant=acme", wait_s=20)
    assert (unloaded.status_code, unloaded.json()["state"]) == (200, "unloaded")
    started = await call(router, "POST", "/bot/unload?tenant=globex", wait_s=0)
    assert (started.status_code, started.json()["state"]) == (202, "unloading")
    gate.set()
    assert (await running).status_code == 200


async def test_a_pin_of_the_same_content_is_each_owners(shared: Shared, worker: FakeWorker) -> None:
    router, same = shared.router, digest("globex")
    await done(router, "POST", "", name="bot", ref="org/globex", tenant="acme", replace=True)
    for tenant in TENANTS:
        await done(router, "POST", f"/bot/pin?tenant={tenant}")
    await done(router, "POST", "/bot/unpin?tenant=acme")
    shown = [await done(router, "GET", f"/bot?tenant={tenant}") for tenant in TENANTS]
    assert [one["pinned"] for one in shown] == [False, True]
    await done(router, "POST", "/bot/unload?tenant=acme")
    assert worker.pins == {same}, "the other's is served from where it lay"
    assert await shared.all_get() == ["409", same, "404"]
    await done(router, "POST", "/bot/unpin?tenant=globex")
    await worker.until(lambda: not worker.pins)


async def test_one_idempotency_key_is_a_request_of_each(shared: Shared) -> None:
    body = {"model": "bot", "prompt": "x"}
    for _ in range(2):
        answers = [
            await shared.router.client.post(
                "/v1/completions", json=body, headers={**bearer(key), "idempotency-key": "same"}
            )
            for key in (shared.acme, shared.globex)
        ]
        assert [answer.headers[DIGEST] for answer in answers] == [digest("acme"), digest("globex")]
    assert {answer.headers["idempotency-replayed"] for answer in answers} == {"true"}


async def replays(shared: Shared, key: str, name: str) -> bool:
    headers = {**bearer(key), "idempotency-key": name}
    body = {"model": "bot", "prompt": "x"}
    answer = await shared.router.client.post("/v1/completions", json=body, headers=headers)
    return "idempotency-replayed" in answer.headers


async def test_kept_answers_of_one_push_out_none_of_another(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT", 2)
    monkeypatch.setattr(memory_store, "MAX_VALUES", 4)
    assert not await replays(shared, shared.globex, "first")
    assert not any([await replays(shared, shared.acme, str(number)) for number in range(6)])
    assert await replays(shared, shared.globex, "first")
    assert await replays(shared, shared.acme, "5")


async def test_answers_whose_time_is_over_take_no_room_from_another(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT", 2)
    kept = shared.router.service.idempotency
    monkeypatch.setattr(kept, "_ttl_s", 0.0)
    assert not await replays(shared, shared.globex, "over")
    monkeypatch.setattr(kept, "_ttl_s", 60.0)
    assert not any([await replays(shared, shared.acme, name) for name in ("1", "2")])
    assert all([await replays(shared, shared.acme, name) for name in ("1", "2")])


async def test_rollouts_of_equal_names_are_apart(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = shared.router
    versions = [{"reference": "org/next", "weight": 100}]
    await done(router, "POST", "/bot/rollout?tenant=acme", versions=versions, guards=None)

    async def serves() -> bool:
        shown = await done(router, "GET", "/bot/rollout?tenant=acme")
        return bool(shown["versions"][1]["state"] == "serving")

    await poll(serves)
    assert await shared.all_get() == [digest("next"), digest("globex"), "404"]
    assert (await call(router, "GET", "/bot/rollout?tenant=globex")).status_code == 409
    assert (await call(router, "POST", "/bot/rollback?tenant=globex")).status_code == 409
    await done(router, "POST", "/bot/promote?tenant=acme")
    await done(router, "POST", "/bot/refresh?tenant=globex")
    assert await shared.all_get() == [digest("next"), digest("globex"), "404"]


async def test_a_guard_takes_back_one_owners_version_of_the_same_content(
    shared: Shared, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.router.operations.rollouts.TICK_S", 0.05)
    router, failing = shared.router, digest("next")
    body = {
        "versions": [{"reference": "org/next", "weight": 100}],
        "guards": {"min_requests": 3, "max_latency_ratio": None},
    }

    async def fail(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return "internal" if request.adapter == failing else None

    async def states() -> dict[str, str]:
        shown = {t: await done(router, "GET", f"/bot/rollout?tenant={t}") for t in TENANTS}
        return {tenant: one["versions"][1]["state"] for tenant, one in shown.items()}

    async def are(**expected: str) -> None:
        async def so() -> bool:
            return await states() == expected

        await poll(so)

    worker.before_token = fail
    for tenant in TENANTS:
        await done(router, "POST", f"/bot/rollout?tenant={tenant}", **body)
    await are(acme="serving", globex="serving")
    for _ in range(3):
        assert (await ask(router, shared.acme)).status_code == 500
    await are(acme="rolled_back", globex="serving")
    assert await got(router, shared.acme) == digest("acme")
    records = (await router.client.get("/v1/audit", headers=ADMIN)).json()["data"]
    assert [(r["target"], r["tenant"]) for r in records if "guard" in r["action"]] == [
        ("bot", "acme")
    ]


async def test_lists_and_pictures_show_whose_a_name_is(shared: Shared) -> None:
    router = shared.router
    await done(router, "POST", "", name="bot", ref="org/fleet")
    for query, expected in (
        ("", [None, "acme", "globex", None]),
        ("?tenant=acme", ["acme"]),
        ("?tenant=", [None, None]),
        ("?tenant=nobody", []),
    ):
        listed = (await done(router, "GET", query))["data"]
        assert [one["tenant"] for one in listed] == expected
    fleet = (await router.client.get("/v1/fleet", headers=ADMIN)).json()
    told = [(one["name"], one["tenant"]) for one in fleet["adapters"]]
    assert told == [("bot", None), ("bot", "acme"), ("bot", "globex"), ("pirate", None)]


async def test_a_request_is_logged_with_its_tenant(
    tmp_path: Path, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "loraplex.router.telemetry.request_log")
    async with keyed(tmp_path, worker, log_requests="yes") as router:
        await ask(router, await create(router, tenant="acme"), "pirate")
    [facts] = [record.__dict__["facts"] for record in caplog.records if "facts" in vars(record)]
    assert (facts["gen_ai.request.model"], facts["loraplex.tenant"]) == ("pirate", "acme")


async def test_figures_are_apart(shared: Shared, worker: FakeWorker) -> None:
    router = shared.router
    worker.script = lambda request: [*b"abcd", EOS]
    await done(router, "POST", "", name="bot", ref="org/fleet")
    for key, count in ((shared.acme, 1), (shared.globex, 2), (shared.other, 3)):
        for _ in range(count):
            assert (await ask(router, key)).status_code == 200
    found = series((await router.client.get("/metrics")).text)
    names = ("acme::bot", "globex::bot", "bot")
    counts = [found["loraplex_adapter_requests_total", frozenset({name})] for name in names]
    assert counts == [1, 2, 3]
    for tenant in TENANTS:
        await done(router, "POST", f"/bot/load?tenant={tenant}")

    async def are_loaded() -> bool:
        rows = series((await router.client.get("/metrics")).text)
        labels = [values for name, values in rows if name == "vllm:lora_adapter_loaded"]
        return {"acme::bot", "globex::bot"} <= frozenset().union(*labels)

    await poll(are_loaded)
    usage = (await router.client.get("/v1/usage", headers=ADMIN)).json()["data"]
    rows = {(row["tenant"], row["adapter"]): row["requests"] for row in usage}
    assert rows == {("acme", "bot"): 1, ("globex", "bot"): 2, ("other", "bot"): 3}


async def test_the_audit_says_whose_name_it_was(shared: Shared) -> None:
    await done(shared.router, "POST", "/bot/pin?tenant=globex")
    await call(shared.router, "DELETE", "/bot?tenant=nobody")
    records = (await shared.router.client.get("/v1/audit", headers=ADMIN)).json()["data"]
    told = [(one["target"], one["tenant"], one["status"]) for one in records[:4]]
    assert told == [
        ("bot", "nobody", 404),
        ("bot", "globex", 200),
        ("bot", "globex", 200),
        ("bot", "acme", 200),
    ]


async def test_vllms_shapes(shared: Shared) -> None:
    router = shared.router
    path = "/v1/load_lora_adapter"
    for tenant in ("other", "acme"):
        body = {"lora_name": "tone", "lora_path": f"hub:org/tone-{tenant}", "tenant": tenant}
        answer = await router.client.post(path, json=body, headers=ADMIN)
        assert answer.status_code == 200, answer.text
    keys = (shared.acme, shared.globex, shared.other)
    expected = [digest("tone-acme"), "404", digest("tone-other")]
    assert [await got(router, key, "tone") for key in keys] == expected
    body = {"lora_name": "tone", "tenant": "acme"}
    answer = await router.client.post("/v1/unload_lora_adapter", json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    expected[0] = "410"
    assert [await got(router, key, "tone") for key in keys] == expected


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("GET", "/bot?tenant=a%2Fb", {}, "tenant"),
        ("GET", "?tenant=a%20b", {}, "tenant"),
        ("DELETE", "/bot?tennant=acme", {}, "`tennant`: unknown parameter"),
        ("POST", "?tenant=acme", {"name": "x", "ref": "org/x"}, "`tenant`: say it in the body"),
        ("POST", "", {"name": "x", "ref": "org/x", "tenant": "a::b"}, "tenant"),
        ("POST", "", {"name": "x", "ref": "org/x", "tenant": ""}, "tenant"),
        ("POST", "", {"name": "acme::x", "ref": "org/x"}, "is not allowed in a name"),
        ("POST", "/bot/unload", {"tenant": "acme"}, "tenant"),
    ],
)
async def test_an_owner_that_is_miswritten_is_not_the_fleet(
    shared: Shared, method: str, path: str, body: dict[str, Any], words: str
) -> None:
    refused = await call(shared.router, method, path, **body)
    assert refused.status_code == 400, refused.text
    assert words in refused.json()["error"]["message"]


async def test_a_name_of_the_base_is_nobodys(shared: Shared) -> None:
    refused = await call(shared.router, "POST", "", name="fake-base", ref="org/x", tenant="acme")
    assert refused.status_code == 409


async def test_a_file_names_owners(tmp_path: Path, worker: FakeWorker) -> None:
    """What it gives a tenant and cannot be had is not the fleet's in its place."""
    file = tmp_path / "adapters.json"
    writes = 0

    def write(*entries: dict[str, Any]) -> None:
        nonlocal writes
        writes += 1
        file.write_text(json.dumps({"adapters": entries}))
        os.utime(file, ns=(writes, writes))

    fleets = {"name": "bot", "ref": "org/fleet"}
    write(fleets, {**fleets, "ref": "org/acme", "tenant": "acme"}, {**fleets, "tenant": "a b"})
    async with keyed(tmp_path, worker, adapters_file=file) as router:
        keys = [await create(router, tenant=tenant) for tenant in ("acme", "other")]

        async def all_get() -> list[str]:
            return [await got(router, key) for key in keys]

        async def applied(*expected: str) -> None:
            async def so() -> bool:
                return await all_get() == list(expected)

            await poll(so)

        await applied(digest("acme"), digest("fleet"))
        errors = (await done(router, "GET", ""))["file_errors"]
        assert len(errors) == 1
        assert errors[0].startswith("a b::bot: ")
        aliases = router.service.catalog.rules.aliases
        assert [r.key for r in aliases.all() if r.origin == "file"] == [
            OwnedName("bot"),
            OwnedName("bot", "acme"),
        ]
        refused = await call(router, "DELETE", "/bot?tenant=acme")
        assert (refused.status_code, "adapters file" in refused.text) == (409, True)
        write(fleets, {**fleets, "ref": "org/missing", "tenant": "other"})
        await applied(digest("fleet"), "422")
        write(fleets)
        await applied(digest("fleet"), digest("fleet"))


async def test_before_the_table_was_read_nobody_gets_the_fleets(
    tmp_path: Path, worker: FakeWorker
) -> None:
    """A tenant may have a name of its own, which only Redis knows."""
    acme, other = "lpx_of_acme", "lpx_of_another"
    file = tmp_path / "keys.json"
    keys = [
        {"id": tenant, "tenant": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for tenant, key in (("acme", acme), ("other", other))
    ]
    file.write_text(json.dumps({"keys": keys}))
    async with running_redis() as redis:
        options: dict[str, Any] = {
            "redis": redis.url,
            "redis_timeout_s": 30.0,
            "keys_file": file,
            "adapters": ("bot=hub:org/fleet",),
        }
        async with keyed(tmp_path / "one", worker, **options) as one:
            await done(one, "POST", "", name="bot", ref="org/acme", tenant="acme")
            assert list((await one.service.sharing.store.read("adapters")).rows) == ["acme::bot"]
            await redis.kill()
            assert await got(one, acme) == digest("acme"), "what was known goes on"
            async with keyed(tmp_path / "two", worker, **options) as two:
                for key in (acme, other):
                    unknown = await ask(two, key, "bot")
                    assert (unknown.status_code, "not known yet" in unknown.text) == (503, True)
                await redis.start()

                async def known() -> bool:
                    return await got(two, acme) == digest("acme")

                await poll(known)
                assert await got(two, other) == digest("fleet")
