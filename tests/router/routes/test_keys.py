"""Keys over HTTP: permissions, quotas, and their reports."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.config import RouterConfigError
from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.generation.test_limits import hold
from tests.router.serving import Running, poll, running_router

ADMIN = {"Authorization": "Bearer admin"}
BODY = {"model": BASE_NAME, "prompt": "x", "max_tokens": 4}


@asynccontextmanager
async def keyed(tmp_path: Path, worker: FakeWorker, **options: Any) -> AsyncIterator[Running]:
    chosen = {"auth": "keys", "admin_key": "admin", "adapters": ("pirate=hub:org/pirate",)}
    async with running_router(tmp_path, worker, **(chosen | options)) as router:
        yield router


@pytest.fixture
async def guarded(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Running]:
    async with keyed(tmp_path, worker) as router:
        yield router


async def create(router: Running, **fields: Any) -> str:
    """A new key."""
    made = await router.client.post("/v1/keys", json=fields, headers=ADMIN)
    assert made.status_code == 201, made.text
    return str(made.json()["key"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def complete(router: Running, key: str, **fields: Any) -> httpx.Response:
    return await router.client.post("/v1/completions", json=BODY | fields, headers=bearer(key))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/generate"),
        ("POST", "/generate_stream"),
        ("POST", "/"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{BASE_NAME}"),
        ("GET", "/v1/usage"),
        ("GET", "/v1/keys"),
        ("GET", "/v1/audit"),
        ("POST", "/v1/load_lora_adapter"),
    ],
)
async def test_without_a_key(guarded: Running, method: str, path: str) -> None:
    for headers in ({}, bearer("lpx_wrong"), {"Authorization": "Basic x"}):
        refused = await guarded.client.request(method, path, headers=headers)
        assert refused.status_code == 401, refused.text
        if path.startswith("/v1/"):
            assert refused.json()["error"]["code"] == "invalid_api_key"
        else:
            assert refused.json()["error_type"] == "unauthorized"


async def test_what_needs_no_key(guarded: Running) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/metrics", "/openapi.json"):
        assert (await guarded.client.get(path)).status_code == 200
    info = (await guarded.client.get("/info")).json()
    assert (info["model_id"], info["adapters"]) == (BASE_NAME, [])


async def test_every_api_takes_a_key(guarded: Running, worker: FakeWorker) -> None:
    headers = bearer(await create(guarded, tenant="acme"))
    post = guarded.client.post
    chat = {"model": BASE_NAME, "messages": [{"role": "user", "content": "x"}]}
    assert (await post("/v1/chat/completions", json=chat, headers=headers)).status_code == 200
    for path in ("/generate", "/generate_stream", "/"):
        answer = await post(path, json={"inputs": "x"}, headers=headers)
        assert answer.status_code == 200
    assert {request.salt for request in worker.requests} == {"acme"}


async def test_priority_is_the_keys_or_its_tenants(tmp_path: Path, worker: FakeWorker) -> None:
    """Of requests to workers too, which keep turns among what they were sent."""
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: [{name: acme, weight: 3, priority: high}]")
    async with keyed(tmp_path, worker, keys_file=file) as router:
        own = await create(router, id="own", tenant="acme", priority="low")
        for key in (own, await create(router, tenant="acme"), await create(router, tenant="b")):
            assert (await complete(router, key)).status_code == 200
        changed = {"priority": None}
        answer = await router.client.patch("/v1/keys/own", json=changed, headers=ADMIN)
        assert answer.json()["priority"] is None
        assert (await complete(router, own)).status_code == 200
        caller = await router.service.tenancy.identify(f"Bearer {own}")
        assert caller.weight == 3.0
    assert [request.priority for request in worker.requests] == [1, -1, 0, -1]


@pytest.mark.parametrize(("own", "band"), [("high", -1), ("normal", 0), ("low", 1)])
async def test_a_request_may_stand_behind_its_keys_others(
    guarded: Running, worker: FakeWorker, own: str, band: int
) -> None:
    headers = bearer(await create(guarded, tenant="acme", priority=own))
    completion = {"model": BASE_NAME, "prompt": "x"}
    for steps in (0, 1, 100):
        body = completion | {"priority": steps}
        answer = await guarded.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        lorax = {"inputs": "x", "parameters": {"priority": steps}}
        assert (await guarded.client.post("/", json=lorax, headers=headers)).status_code == 200
    raised = completion | {"priority": -1}
    answer = await guarded.client.post("/v1/completions", json=raised, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert [r.priority for r in worker.requests[::2]] == [band, band + 1, band + 100]
    assert [r.priority for r in worker.requests[1::2]] == [band, band + 1, band + 100]


async def test_salts_keep_prefixes_apart_within_a_tenant(
    guarded: Running, worker: FakeWorker
) -> None:
    for tenant in ("acme", "b"):
        headers = bearer(await create(guarded, tenant=tenant))
        for salt in (None, "one", "two", "one"):
            body = {"model": BASE_NAME, "prompt": "x", "cache_salt": salt}
            await guarded.client.post("/v1/completions", json=body, headers=headers)
    plain, one, two, again, *others = (request.salt for request in worker.requests)
    assert plain == "acme"
    assert one == again
    assert len({plain, one, two, *others}) == 6


async def test_a_key_is_shown_once_and_kept_hashed(guarded: Running) -> None:
    key = await create(guarded, id="app", tenant="acme", label="the app")
    told = await guarded.client.get("/v1/keys", headers=ADMIN)
    one = await guarded.client.get("/v1/keys/app", headers=ADMIN)
    audit = await guarded.client.get("/v1/audit", headers=ADMIN)
    assert one.json()["label"] == "the app"
    for answer in (told, one, audit):
        assert key not in answer.text
        assert hashlib.sha256(key.encode()).hexdigest() not in answer.text
    rows = (await guarded.service.sharing.store.read("keys")).rows
    assert key.encode() not in rows["app"].value


async def test_a_maker_of_keys_hears_what_they_do_not(
    guarded: Running, tmp_path: Path, worker: FakeWorker
) -> None:
    made = await guarded.client.post("/v1/keys", json={}, headers=ADMIN)
    (ends,) = made.json()["hints"]
    assert ends == "the key is gone when this router ends: --redis or --keys-file keep keys"
    async with keyed(tmp_path / "open", worker, auth="none") as router:
        made = await router.client.post("/v1/keys", json={}, headers=ADMIN)
        assert made.json()["hints"] == [
            "this router asks nobody for a key: start it with --auth keys",
            ends,
        ]


async def test_a_hint_names_only_what_a_key_opens(guarded: Running) -> None:
    meant = "; did you mean pirate?"
    for models, is_meant in ((["*"], True), (["p?rates"], False)):
        key = await create(guarded, models=models)
        refused = await complete(guarded, key, model="pirates")
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].endswith(meant) == is_meant
        one = await guarded.client.get("/v1/models/pirates", headers=bearer(key))
        assert one.json()["error"]["message"].endswith(meant) == is_meant
    operator = await guarded.client.post("/v1/adapters/priate/pin", headers=ADMIN)
    assert operator.json()["error"]["message"].endswith(meant)


async def test_block_rotate_expire_delete(guarded: Running) -> None:
    key = await create(guarded, id="app")
    post = guarded.client.post
    assert (await complete(guarded, key)).status_code == 200
    assert (await post("/v1/keys/app/block", headers=ADMIN)).json()["blocked"] is True
    refused = await complete(guarded, key)
    assert (refused.status_code, "blocked" in refused.text) == (401, True)
    await post("/v1/keys/app/unblock", headers=ADMIN)
    assert (await complete(guarded, key)).status_code == 200

    rotated = await post("/v1/keys/app/rotate", json={"grace_s": 3600}, headers=ADMIN)
    second = rotated.json()["key"]
    assert [(await complete(guarded, k)).status_code for k in (key, second)] == [200, 200]
    third = (await post("/v1/keys/app/rotate", headers=ADMIN)).json()["key"]
    codes = [(await complete(guarded, k)).status_code for k in (key, second, third)]
    assert codes == [401, 401, 200]

    patch = await guarded.client.patch("/v1/keys/app", json={"expires_at": 1}, headers=ADMIN)
    assert patch.status_code == 200
    assert "expired" in (await complete(guarded, third)).text
    await guarded.client.patch("/v1/keys/app", json={"expires_at": None}, headers=ADMIN)
    assert (await complete(guarded, third)).status_code == 200
    assert (await guarded.client.delete("/v1/keys/app", headers=ADMIN)).json()["deleted"] is True
    assert (await complete(guarded, third)).status_code == 401
    gone = await guarded.client.get("/v1/keys/app", headers=ADMIN)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "key_not_found")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tenant": "a b"}, "tenant"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"rpm": 5}}, "limits.rpm"),
        ({"limit": {}}, "limit"),
        ({"models": ["x"] * 257}, "models"),
        ({"expires_at": -1}, "expires_at"),
        ({"expires_at": 1}, "expires_at"),
    ],
)
async def test_bad_keys_are_not_made(guarded: Running, fields: Any, param: str) -> None:
    refused = await guarded.client.post("/v1/keys", json=fields, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await guarded.client.get("/v1/keys", headers=ADMIN)).json()["data"] == []


async def test_a_name_is_taken_once(guarded: Running) -> None:
    await create(guarded, id="app")
    again = await guarded.client.post("/v1/keys", json={"id": "app"}, headers=ADMIN)
    assert again.status_code == 409


async def test_a_key_opens_what_its_patterns_say(guarded: Running, worker: FakeWorker) -> None:
    key = await create(guarded, models=["pirate", "hub:acme/*"])
    for model, status in (("pirate", 200), ("acme/lora", 200), ("hub:acme/x@v1", 200)):
        assert (await complete(guarded, key, model=model)).status_code == status
    before = len(worker.requests)
    for model in (BASE_NAME, "other/lora", "no-such-name", "hub:org/pirate"):
        refused = await complete(guarded, key, model=model)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    merged = {
        "inputs": "x",
        "parameters": {"merged_adapters": {"ids": ["pirate", "other/lora"], "weights": [1, 1]}},
    }
    refused = await guarded.client.post("/generate", json=merged, headers=bearer(key))
    assert (refused.status_code, refused.json()["error_type"]) == (403, "forbidden")
    assert len(worker.requests) == before
    models = await guarded.client.get("/v1/models", headers=bearer(key))
    assert [model["id"] for model in models.json()["data"]] == ["pirate"]
    hidden = await guarded.client.get(f"/v1/models/{BASE_NAME}", headers=bearer(key))
    assert hidden.status_code == 404
    info = await guarded.client.get("/info", headers=bearer(key))
    assert info.json()["adapters"] == ["pirate"]


async def test_a_key_is_never_shown_to_a_source(guarded: Running) -> None:
    key = await create(guarded)
    assert (await complete(guarded, key, model="org/lora")).status_code == 200
    assert {token for _, token in guarded.hub.calls} == {None}


async def test_requests_a_minute(guarded: Running) -> None:
    key = await create(guarded, limits={"requests_per_minute": 2})
    first = await complete(guarded, key)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert "x-ratelimit-limit-tokens" not in first.headers
    stream = await complete(guarded, key, stream=True)
    assert stream.headers["x-ratelimit-remaining-requests"] == "0"
    for stream_too in (False, True):
        refused = await complete(guarded, key, stream=stream_too)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    lorax = await guarded.client.post("/generate", json={"inputs": "x"}, headers=bearer(key))
    assert (lorax.status_code, lorax.json()["error_type"]) == (429, "rate_limited")
    other = await complete(guarded, key, model="org/lora")
    assert (other.status_code, guarded.hub.calls) == (429, []), "no work is done for it"
    raised = {"limits": {"tokens_per_minute": 1_000_000}}
    key_id = (await guarded.client.get("/v1/keys", headers=ADMIN)).json()["data"][0]["id"]
    await guarded.client.patch(f"/v1/keys/{key_id}", json=raised, headers=ADMIN)
    assert (await complete(guarded, key)).status_code == 200, "its limits are others now"
    assert (await complete(guarded, await create(guarded))).status_code == 200


async def test_tokens_are_reserved_and_what_is_not_used_comes_back(guarded: Running) -> None:
    key = await create(guarded, limits={"budget_tokens": 200})
    assert (await complete(guarded, key, max_tokens=190)).status_code == 200
    await guarded.until_idle()
    # The answer was far shorter: this one would not fit otherwise.
    assert (await complete(guarded, key, max_tokens=150)).status_code == 200
    refused = await complete(guarded, key, max_tokens=190)
    assert (refused.status_code, "left of its budget" in refused.text) == (429, True)
    never = await complete(guarded, key, max_tokens=200)
    assert (never.status_code, "its budget is 200" in never.text) == (400, True)
    assert "retry-after" not in never.headers


async def test_concurrency(tmp_path: Path) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    async with running_worker(worker), keyed(tmp_path, worker) as router:
        key = await create(router, limits={"concurrency": 1})
        running = asyncio.create_task(complete(router, key))

        async def started() -> bool:
            return len(worker.requests) == 1

        await poll(started)
        refused = await complete(router, key)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        gate.set()
        assert (await running).status_code == 200
        assert (await complete(router, key)).status_code == 200


async def test_usage_by_key_and_adapter(guarded: Running) -> None:
    acme = await create(guarded, id="a", tenant="acme")
    other = await create(guarded, id="o", tenant="other")
    for model in (BASE_NAME, "pirate", "alias:pirate"):
        assert (await complete(guarded, acme, model=model)).status_code == 200
    await complete(guarded, other)
    await complete(guarded, other, model="org/missing")
    get = guarded.client.get
    all_rows = (await get("/v1/usage", headers=ADMIN)).json()["data"]
    requests = {(row["tenant"], row["key"], row["adapter"]): row["requests"] for row in all_rows}
    assert requests == {
        ("acme", "a", ""): 1,
        ("acme", "a", "pirate"): 2,
        ("other", "o", ""): 1,
        ("other", "o", "_other"): 0,
    }
    assert [row["refused"] for row in all_rows] == [0, 0, 0, 1]
    own = (await get("/v1/usage", headers=bearer(acme))).json()
    assert {row["tenant"] for row in own["data"]} == {"acme"}
    assert all(row["prompt_tokens"] and row["completion_tokens"] for row in own["data"])
    one = await get("/v1/usage?key=a&adapter=pirate", headers=ADMIN)
    assert [row["requests"] for row in one.json()["data"]] == [2]
    forbidden = await get("/v1/usage?tenant=acme", headers=bearer(other))
    assert forbidden.status_code == 403
    records = (await get("/v1/usage/requests?limit=2", headers=bearer(acme))).json()["data"]
    assert [(r["adapter"], r["outcome"]) for r in records] == [("pirate", "ok")] * 2
    for query in ("start=x", "start=2026-01-02&end=2026-01-01", "start=1970-01-01", "end=9"):
        assert (await get(f"/v1/usage?{query}", headers=ADMIN)).status_code == 400
    for path in ("usage?tennant=acme", "usage/requests?key=a", "audit?tenant=acme"):
        misspelt = await get(f"/v1/{path}", headers=ADMIN)
        assert (misspelt.status_code, "unknown parameter" in misspelt.text) == (400, True)
    old = await get("/v1/usage?start=2026-01-01&end=2026-01-31", headers=ADMIN)
    assert old.json()["data"] == []


async def test_a_prompt_alone_costs_the_prompt_alone(guarded: Running) -> None:
    """It may fill the context: nothing is generated."""
    key = await create(guarded, id="a")
    wanted = {"prompt": [97] * 512, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = await complete(guarded, key, **wanted)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 512
    assert answer.json()["usage"]["completion_tokens"] == 0
    usage = (await guarded.client.get("/v1/usage", headers=ADMIN)).json()["data"]
    assert [(row["prompt_tokens"], row["completion_tokens"]) for row in usage] == [(512, 0)]
    refused = await complete(guarded, key, **wanted | {"prompt": [97] * 513})
    assert (refused.status_code, "more to generate" in refused.text) == (400, False)


async def test_a_tenant_without_keys_is_still_in_the_bill(guarded: Running) -> None:
    key = await create(guarded, id="a", tenant="acme")
    assert (await complete(guarded, key)).status_code == 200
    assert (await guarded.client.delete("/v1/keys/a", headers=ADMIN)).status_code == 200
    for path in ("usage", "usage/requests"):
        told = (await guarded.client.get(f"/v1/{path}", headers=ADMIN)).json()["data"]
        assert [(row["tenant"], row["key"]) for row in told] == [("acme", "a")]


@pytest.mark.parametrize("limit", ["0", "1001", "x", "", "0000000019", "1" * 5000])
async def test_a_limit_that_is_none(guarded: Running, limit: str) -> None:
    for path in ("usage/requests", "audit"):
        answer = await guarded.client.get(f"/v1/{path}?limit={limit}", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_a_stream_that_is_left_counts_what_it_got(tmp_path: Path) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    async with running_worker(worker), keyed(tmp_path, worker) as router:
        key = await create(router, id="a", limits={"concurrency": 1})
        leaving = asyncio.create_task(complete(router, key, stream=True))

        async def started() -> bool:
            return len(worker.requests) == 1

        await poll(started)
        leaving.cancel()
        await router.until_idle()
        gate.set()
        rows = (await router.client.get("/v1/usage", headers=ADMIN)).json()["data"]
        assert [(row["requests"], row["unfinished"]) for row in rows] == [(1, 1)]
        assert (await complete(router, key)).status_code == 200


async def test_operators_are_audited(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="loraplex.router.tenancy.audit"):
        await create(guarded, id="app", tenant="acme")
        await guarded.client.delete("/v1/keys/none", headers=ADMIN | {"x-request-id": "r7"})
        await guarded.client.post("/v1/keys", headers=bearer("guess"))
        await guarded.client.post("/v1/adapters/pirate/unload", headers=ADMIN)
        for path in ("keys", "adapters/pirate"):  # they only look
            looked = await guarded.client.head(f"/v1/{path}", headers=ADMIN)
            assert (looked.status_code, looked.content) == (200, b"")
    assert len((await guarded.client.get("/v1/keys", headers=ADMIN)).json()["data"]) == 1
    entries = (await guarded.client.get("/v1/audit", headers=ADMIN)).json()["data"]
    assert [(e["action"], e["target"], e["status"]) for e in reversed(entries)] == [
        ("POST /v1/keys", "app", 201),
        ("DELETE /v1/keys/none", "none", 404),
        ("POST /v1/keys", "", 401),
        ("POST /v1/adapters/pirate/unload", "pirate", 200),
    ]
    assert (entries[2]["request_id"], entries[3]["tenant"]) == ("r7", "acme")
    assert len((await guarded.client.get("/v1/audit?limit=1", headers=ADMIN)).json()["data"]) == 1
    lines = [json.loads(r.message.removeprefix("audit ")) for r in caplog.records]
    assert lines == list(reversed(entries))


def write_keys(path: Path, key: str, **fields: Any) -> None:
    entry = {"id": "app", "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}
    tenants = [{"name": "acme", "limits": {"requests_per_minute": 2}}]
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"keys": [entry], "tenants": tenants}))
    staged.replace(path)


async def test_a_file_of_keys_is_followed(
    tmp_path: Path,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("loraplex.router.tenancy.keyring.FILE_POLL_S", 0.01)
    path = tmp_path / "keys.json"
    write_keys(path, "first", tenant="acme")
    async with keyed(tmp_path, worker, auth="auto", keys_file=path) as router:
        assert (await complete(router, "first")).status_code == 200
        changed = await router.client.post("/v1/keys/app/block", headers=ADMIN)
        assert changed.status_code == 409  # it is the file's
        write_keys(path, "second-key", tenant="acme")

        async def second_is_good() -> bool:
            return (await complete(router, "second-key")).status_code != 401

        await poll(second_is_good)
        assert (await complete(router, "first")).status_code == 401
        # The tenant's own limit holds for all of its keys.
        codes = [(await complete(router, "second-key")).status_code for _ in range(3)]
        assert codes[-1] == 429
        path.write_text("keys: [")

        async def told() -> bool:
            return "left as it was" in caplog.text

        await poll(told)
        assert (await complete(router, "second-key")).status_code == 429


async def test_what_cannot_start(tmp_path: Path) -> None:
    for options, why in (
        ({"host": "0.0.0.0"}, "--auth none"),
        ({"auth": "keys"}, "--keys-file"),
        ({"keys_file": tmp_path / "none.yaml"}, "cannot be read"),
        ({"redis": "http://x"}, "--redis: expected"),
        ({"redis": "redis://:secret@x"}, "LORAPLEX_REDIS_PASSWORD"),
    ):
        with pytest.raises(RouterConfigError, match=why) as refused:
            async with running_router(tmp_path, **options):
                pass
        assert ":secret" not in str(refused.value)


async def test_keys_where_others_can_reach(tmp_path: Path, worker: FakeWorker) -> None:
    async with running_router(tmp_path, worker, host="0.0.0.0", admin_key="admin") as router:
        assert (await router.client.post("/v1/completions", json=BODY)).status_code == 401
        assert (await complete(router, await create(router))).status_code == 200


async def test_the_curl_lines_of_the_docs(guarded: Running) -> None:
    page = (Path(__file__).parents[3] / "docs/operations/tenancy.md").read_text()
    address = str(guarded.client.base_url).removeprefix("http://").rstrip("/")
    environ = {**os.environ, "LORAPLEX_ADMIN_KEY": "admin", "KEY": ""}
    commands = [
        f"curl {command}"
        for block in re.findall(r"```sh\n(.*?)```", page, re.S)
        for command in block.split("curl ")[1:]
    ]
    assert len(commands) == 8
    for command in commands:
        told = await asyncio.create_subprocess_shell(
            command.replace("localhost:8080", address).replace("curl ", "curl -sS ", 1),
            env=environ,
            stdout=asyncio.subprocess.PIPE,
        )
        answer = json.loads((await asyncio.wait_for(told.communicate(), 240))[0])
        assert not answer.get("error"), (command, answer)
        if answer["object"] == "new_key" and not environ["KEY"]:
            environ["KEY"] = answer["key"]
