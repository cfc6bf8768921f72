"""Uploads over HTTP: versions of a name, parts, keys and quotas; a refusal leaves nothing."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.errors import AdapterError, Violation
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import format_ref
from loraplex.router.policy.upload_options import UploadOptions
from loraplex.server.protocol import AdapterLoad
from tests.adapters.uploads.bodies import CONFIG, FILES, WEIGHTS, archive
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.serving import Running, poll, running_router

OTHERS = [("adapter_model.safetensors", WEIGHTS)]
ADMIN = {"authorization": "Bearer admin"}
NAME = "/v1/adapters/policy"


def body(number: int) -> bytes:
    """An upload whose content no other number has."""
    config = CONFIG + b" " * number
    return archive([("adapter_config.json", config), ("adapter_model.safetensors", WEIGHTS)])


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[Running, FakeWorker]]:
    options: dict[str, Any] = {"admin_key": "admin", "auth": "keys"}
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, **options) as router,
    ):
        router.client.headers.update(ADMIN)
        yield router, worker


async def put(router: Running, content: bytes, **query: Any) -> httpx.Response:
    return await router.client.put(NAME, content=content, params=query)


def left_over(folder: Path) -> set[str]:
    """Names of what lies in the folder of uploads, beside whole uploads."""
    return {path.name for path in folder.glob("cache/uploads/staging/*")}


async def test_versions_are_numbered_and_kept(fleet: tuple[Running, FakeWorker]) -> None:
    router, worker = fleet
    key = (await router.client.post("/v1/keys", json={})).json()["key"]
    caller = {"authorization": f"Bearer {key}"}
    shown = [(await put(router, body(number), keep=2)).json() for number in (1, 2, 3)]
    assert [answer["version"] for answer in shown] == [1, 2, 3]
    assert [kept["version"] for kept in shown[-1]["adapter"]["kept"]] == [2, 3]
    assert shown[-1]["missing"] == {}
    digests = [make_manifest(answer["upload"].removeprefix("upload:")).digest for answer in shown]
    assert [answer["adapter"]["digest"] for answer in shown] == digests
    for model, status, digest in (
        ("policy", 200, digests[2]),
        ("policy@3", 200, digests[2]),
        ("policy@2", 200, digests[1]),
        ("policy@1", 410, None),
        ("policy@4", 404, None),
        (shown[0]["upload"], 403, None),
    ):
        ask = {"model": model, "prompt": "x", "max_tokens": 1}
        answer = await router.client.post("/v1/completions", json=ask, headers=caller)
        assert answer.status_code == status, (model, answer.text)
        assert answer.headers.get("x-loraplex-adapter-digest") == digest
    assert {format_ref(load.ref) for load in worker.loads} == {a["upload"] for a in shown}
    again = (await put(router, body(3))).json()
    assert again["version"] == 3, "the same content is no new version"
    gone = await router.client.delete(NAME)
    assert gone.status_code == 200
    assert (await put(router, body(1))).json()["version"] == 4, "numbers do not come again"


async def test_forms_of_a_body(fleet: tuple[Running, FakeWorker]) -> None:
    router, _ = fleet
    as_tar = (await put(router, archive())).json()
    form = {name: (name, content) for name, content in FILES.items()}
    as_form = await router.client.put(NAME, files=form)
    assert as_form.json()["upload"] == as_tar["upload"]
    from safetensors.numpy import load, save

    alone = save(load(WEIGHTS), {"adapter_config.json": CONFIG.decode()})
    assert (await put(router, alone)).status_code == 200
    for content, headers, status in (
        (WEIGHTS, {}, 422),
        (b"PK\x03\x04" + archive(), {}, 422),
        (b"\x1f\x8b" + archive(), {}, 422),
        (archive(), {"content-encoding": "gzip"}, 415),
        (b"{}", {"content-type": "application/json"}, 415),
        (archive(), {"content-type": "multipart/form-data; boundary=x"}, 400),
    ):
        refused = await router.client.put(NAME, content=content, headers=headers)
        assert refused.status_code == status, refused.text
    empty = await put(router, archive([]))
    assert "the upload has no adapter_config.json" in empty.json()["error"]["message"]


def digest_field(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


async def test_a_digest_of_the_body_is_checked(
    fleet: tuple[Running, FakeWorker], tmp_path: Path
) -> None:
    router, _ = fleet
    right = {"content-digest": digest_field(archive())}
    assert (await router.client.put(NAME, content=archive(), headers=right)).status_code == 200
    wrong = {"repr-digest": digest_field(b"other")}
    refused = await router.client.put(f"{NAME}2", content=body(1), headers=wrong)
    assert refused.status_code == 422
    assert refused.json()["error"]["violations"][0]["code"] == "digest_mismatch"
    assert len(list((tmp_path / "cache/uploads").iterdir())) == 2
    assert left_over(tmp_path) == set()


class InParts:
    """Sends an upload of a known digest in parts."""

    def __init__(self, router: Running, whole: bytes) -> None:
        self._router = router
        self._whole = whole
        self._digest = {"repr-digest": digest_field(whole)}

    def head(self, start: int, stop: int) -> dict[str, str]:
        return {"content-range": f"bytes {start}-{stop - 1}/{len(self._whole)}", **self._digest}

    async def put(self, start: int, stop: int | None = None) -> httpx.Response:
        content = self._whole[start:stop]
        head = self.head(start, start + len(content))
        return await self._router.client.put(NAME, content=content, headers=head)

    async def received(self) -> int:
        head = {"content-range": f"bytes */{len(self._whole)}", **self._digest}
        answer = await self._router.client.put(NAME, headers=head)
        assert answer.status_code == 308, answer.text
        return int(answer.json()["received"])

    @asynccontextmanager
    async def broken_off(self, stop: int, leaves: bool) -> AsyncIterator[None]:
        """A connection that sends the bytes before `stop`, and then its end or nothing more. The
        router waits for them already.
        """
        head = {"host": "127.0.0.1", "content-length": str(len(self._whole)), **ADMIN}
        head |= {"expect": "100-continue", **self.head(0, len(self._whole))}
        lines = [f"PUT {NAME} HTTP/1.1", *(f"{name}: {said}" for name, said in head.items())]
        port = self._router.client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(self._whole[:stop])
            await writer.drain()
            if leaves:
                writer.close()
            yield
        finally:
            writer.close()


async def test_an_upload_in_parts(fleet: tuple[Running, FakeWorker], tmp_path: Path) -> None:
    router, _ = fleet
    whole, cut = archive(), 700
    parts = InParts(router, whole)
    assert await parts.received() == 0
    first = await parts.put(0, cut)
    assert (first.status_code, first.json()) == (308, {"received": cut})
    assert first.headers["range"] == f"bytes=0-{cut - 1}"
    ahead = await parts.put(cut + 10)
    assert (ahead.status_code, ahead.json()) == (308, {"received": cut})
    assert await parts.received() == cut
    last = await parts.put(cut - 100)
    assert last.status_code == 200, last.text
    assert last.json()["upload"] == (await put(router, whole)).json()["upload"]
    assert left_over(tmp_path) == set()


async def test_parts_of_uploads_of_one_length_do_not_mix(fleet: tuple[Running, FakeWorker]) -> None:
    router, _ = fleet
    one, other = (
        archive([("adapter_config.json", CONFIG + end), *OTHERS]) for end in (b" ", b"\n")
    )
    assert len(one) == len(other)
    assert (await InParts(router, one).put(0, 700)).json() == {"received": 700}
    assert (await InParts(router, other).put(700)).json() == {"received": 0}
    bare = {"content-range": f"bytes 700-{len(other) - 1}/{len(other)}"}
    refused = await router.client.put(NAME, content=other[700:], headers=bare)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content-range")
    assert "Repr-Digest" in refused.json()["error"]["message"]


@pytest.mark.parametrize("leaves", [True, False])
async def test_what_came_before_a_connection_broke_counts(
    fleet: tuple[Running, FakeWorker], leaves: bool
) -> None:
    """Also where the router has no sign that the connection is broken."""
    router, _ = fleet
    parts = InParts(router, archive())

    async def kept() -> bool:
        """Tried anew where the question came before the bytes."""
        async with parts.broken_off(700, leaves):
            return await parts.received() == 700

    await poll(kept)
    assert (await parts.put(700)).status_code == 200


async def test_what_a_worker_refuses_changes_nothing(
    fleet: tuple[Running, FakeWorker], tmp_path: Path
) -> None:
    router, worker = fleet
    before = (await put(router, body(1))).json()

    async def refuse(load: AdapterLoad) -> AdapterManifest:
        violation = Violation("rank_mismatch", "q_proj", "expected rank 8, got 9")
        raise AdapterError("invalid", "the adapter cannot be served", (violation,))

    worker.loader = refuse
    refused = await put(router, body(2))
    assert refused.status_code == 422
    assert refused.json()["error"]["violations"][0]["code"] == "rank_mismatch"
    shown = (await router.client.get(NAME)).json()
    assert (shown["ref"], len(shown["kept"])) == (before["upload"], 1)


async def test_an_upload_takes_no_other_names_place(fleet: tuple[Running, FakeWorker]) -> None:
    router, _ = fleet
    register = {"name": "policy", "ref": "hub:org/one"}
    assert (await router.client.post("/v1/adapters", json=register)).status_code == 200
    assert (await put(router, body(1))).status_code == 409
    assert (await put(router, body(1), replace="true")).json()["version"] == 1
    assert (await put(router, body(2))).json()["version"] == 2
    rolling = {"versions": [{"reference": "hub:org/two", "weight": 10}]}
    assert (await router.client.post(f"{NAME}/rollout", json=rolling)).status_code == 200
    assert (await put(router, body(3))).status_code == 409


async def test_keys_with_the_right_upload_for_their_tenant(
    fleet: tuple[Running, FakeWorker],
) -> None:
    router, _ = fleet

    async def key(**wanted: Any) -> dict[str, str]:
        made = await router.client.post("/v1/keys", json=wanted)
        return {"authorization": f"Bearer {made.json()['key']}"}

    trainer = await key(tenant="acme", models=["policy*"], rights=["upload"])
    plain = await key(tenant="acme")
    other = await key(tenant="umbrella", rights=["upload"])
    for headers, name, status in (
        (plain, "policy", 401),
        (trainer, "stranger", 403),
        (trainer, "policy?tenant=umbrella", 403),
        (trainer, "policy", 200),
    ):
        answer = await router.client.put(f"/v1/adapters/{name}", content=body(1), headers=headers)
        assert answer.status_code == status, answer.text
    assert answer.json()["adapter"]["tenant"] == "acme"
    ask = {"model": "policy", "prompt": "x", "max_tokens": 1}
    for headers, status in ((plain, 200), (other, 404)):
        answered = await router.client.post("/v1/completions", json=ask, headers=headers)
        assert answered.status_code == status
    assert (await router.client.get(NAME, headers=trainer)).json()["tenant"] == "acme"
    assert (await router.client.delete(NAME, headers=other)).status_code == 404
    assert (await router.client.post(f"{NAME}/unload", headers=trainer)).status_code == 401
    beyond = await router.client.post(
        "/v1/completions", json={**ask, "model": "policy@9"}, headers=plain
    )
    assert "no version 9 of adapter 'policy'" in beyond.json()["error"]["message"]
    assert (await router.client.delete(NAME, headers=trainer)).status_code == 200
    for name, words in (("policy", "adapter 'policy' has been"), ("policy1", "as 'policy1'")):
        gone = await router.client.get(f"/v1/adapters/{name}", headers=trainer)
        assert words in gone.json()["error"]["message"]


async def test_limits(tmp_path: Path) -> None:
    limits = UploadOptions(max_bytes=8192, tenant_bytes=2500)
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, upload=limits) as router,
    ):
        large = archive([*FILES.items(), ("more", bytes(9000))])
        assert (await put(router, large)).status_code == 413
        chunked = await router.client.put(NAME, content=_chunks(large))
        assert chunked.status_code == 422, "no length was announced"
        assert chunked.json()["error"]["code"] == "adapter_too_large"
        # A manifest of the fake worker says 1,000 bytes.
        assert [(await put(router, body(i), keep=3)).status_code for i in (1, 2)] == [200, 200]
        refused = await put(router, body(3), keep=3)
        assert refused.status_code == 422
        assert "2500" in refused.json()["error"]["message"]
        assert (await put(router, body(3), keep=2)).status_code == 200
        assert left_over(tmp_path) == set()


async def _chunks(content: bytes) -> AsyncIterator[bytes]:
    yield content
