"""Files of tenants: kept, bounded, expired, and nobody else's."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.api.files_and_batches import FileObject
from loraplex.router.files.store import FileStore, folder_id
from loraplex.router.files.stored_file import StorageLimits, name_of
from loraplex.router.policy.batch_limits import FilesLimits
from tests.router.batches.running_batches import ROUTE, BatchUser, Held, jsonl, line, until
from tests.router.fake_worker import FakeWorker
from tests.router.serving import Running, running_router

KEYS = {"acme": "lpx_acme", "other": "lpx_other", "small": "lpx_small"}


@asynccontextmanager
async def keyed_router(
    tmp_path: Path, worker: FakeWorker, **options: Any
) -> AsyncIterator[Running]:
    """`small` may store two files of 2000 bytes together."""
    keys = [
        {"id": name, "tenant": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in KEYS.items()
    ]
    tenants = [{"name": "small", "files": 2, "file_bytes": 2000}]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys, "tenants": tenants}))
    async with running_router(
        tmp_path,
        worker,
        keys_file=tmp_path / "keys.json",
        files_dir=tmp_path / "files",
        **options,
    ) as router:
        yield router


async def test_a_file_is_kept_as_it_came(tmp_path: Path, worker: FakeWorker) -> None:
    async with running_router(tmp_path, worker, files_dir=tmp_path / "files") as router:
        user, content = BatchUser(router), os.urandom(3 << 20)
        file = await user.upload(content)
        assert (file["bytes"], file["filename"], file["purpose"]) == (3 << 20, "in.jsonl", "batch")
        assert file["expires_at"] == file["created_at"] + 30 * 86400
        assert await user.call("GET", f"/v1/files/{file['id']}") == file
        got = await router.client.get(f"/v1/files/{file['id']}/content")
        assert got.content == content
        short = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        brief = await user.upload(b"{}", fields=short)
        assert brief["expires_at"] == brief["created_at"] + 3600
        listed = (await user.call("GET", "/v1/files?order=asc"))["data"]
        assert [one["id"] for one in listed] == [file["id"], brief["id"]]


async def test_files_are_their_tenants(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed_router(tmp_path, worker) as router:
        acme, other = (BatchUser(router, KEYS[name]) for name in ("acme", "other"))
        file = await acme.upload(jsonl([line("a")]))
        path = f"/v1/files/{file['id']}"
        for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/content")):
            await other.call(method, where, 404)
        wanted = {"input_file_id": file["id"], "endpoint": ROUTE, "completion_window": "24h"}
        await other.call("POST", "/v1/batches", 404, json=wanted)
        made = await acme.call("POST", "/v1/batches", json=wanted)
        over = await acme.until_over(made["id"])
        assert over["request_counts"]["completed"] == 1
        await other.call("GET", f"/v1/batches/{made['id']}", 404)
        await other.call("GET", f"/v1/files/{over['output_file_id']}", 404)
        for where in ("/v1/files", "/v1/batches"):
            assert (await other.call("GET", where))["data"] == []
        assert (await router.client.get("/v1/files")).status_code == 401
        usage = await acme.call("GET", "/v1/usage/requests")
        assert [one["key"] for one in usage["data"]] == ["acme"]


async def test_lines_need_a_key_that_is_good_still(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed_router(tmp_path, worker, admin_key="root") as router:
        admin = {"authorization": "Bearer root"}
        made = await router.client.post(
            "/v1/keys", headers=admin, json={"id": "brief", "tenant": "acme", "models": ["*"]}
        )
        user = BatchUser(router, made.json()["key"])
        held = Held(worker)
        batch = await user.start([line(f"{i}") for i in range(80)])
        await worker.until(lambda: len(worker.requests) >= 10)
        await router.client.delete("/v1/keys/brief", headers=admin)
        held.open.set()
        colleague = BatchUser(router, KEYS["acme"])
        over = await colleague.until_over(batch["id"])
        counts = over["request_counts"]
        assert counts["completed"] + counts["failed"] == 80
        failed = await colleague.answers(over["error_file_id"])
        assert failed
        assert {one["response"]["status_code"] for one in failed.values()} == {401}


async def test_nobody_else_can_speak_for_a_key(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed_router(tmp_path, worker) as router:
        for said in ("Batch x:acme:acme", "Batch :acme:acme", "Batch", "batch ü:acme:acme"):
            headers = {b"authorization": said.encode()}
            answer = await router.client.get("/v1/files", headers=headers)
            assert answer.status_code == 401
        voucher = router.service.tenancy.vouchers.header("acme", "other")
        answer = await router.client.get("/v1/files", headers={"authorization": voucher})
        assert answer.status_code == 401  # the key is another tenant's


async def test_a_tenants_files_are_bounded(tmp_path: Path, worker: FakeWorker) -> None:
    limits = FilesLimits(max_file_bytes=3000)
    async with keyed_router(tmp_path, worker, files=limits) as router:
        small, acme = (BatchUser(router, KEYS[name]) for name in ("small", "acme"))
        first = await small.upload(b"x" * 1500)
        assert "2000 bytes" in (await small.upload(b"x" * 1500, 409))["error"]["message"]
        await small.upload(b"x" * 100)
        assert "may have 2" in (await small.upload(b"x", 409))["error"]["message"]
        await small.call("DELETE", f"/v1/files/{first['id']}")
        kept = await small.upload(b"x" * 1500)
        body = {"input_file_id": kept["id"], "endpoint": ROUTE, "completion_window": "24h"}
        await small.call("POST", "/v1/batches", 409, json=body)
        assert (await acme.upload(b"x" * 3001, 413))["error"]["param"] == "file"
        await acme.upload(b"x" * 3000)
        assert not [*(tmp_path / "files").rglob("*.part")]


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "7200"}, "expires_after[anchor]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at"},
            "expires_after[seconds]",
        ),
        ({"purpose": "batch", "nonsense": "1"}, "nonsense"),
    ],
)
async def test_bad_forms_are_named(
    tmp_path: Path, worker: FakeWorker, form: dict[str, str], field: str
) -> None:
    async with running_router(tmp_path, worker, files_dir=tmp_path / "files") as router:
        user = BatchUser(router)
        files = {"file": ("a.jsonl", b"{}")}
        error = (await user.call("POST", "/v1/files", 400, data=form, files=files))["error"]
        assert error["param"] == field
        await user.call("POST", "/v1/files", 415, json={"purpose": "batch"})
        page = await router.client.post(
            "/v1/files", data=form, files=files, headers={"origin": "http://evil.example"}
        )
        assert page.status_code == 403
        assert not [*(tmp_path / "files").rglob("file-*")]


async def test_a_client_that_leaves_leaves_nothing(tmp_path: Path, worker: FakeWorker) -> None:
    async with running_router(tmp_path, worker, files_dir=tmp_path / "files") as router:
        url = router.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n"
        writer.write(head + b"content-type: multipart/form-data; boundary=e\r\n\r\n")
        part = b'--e\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
        writer.write(part + b"x" * (2 << 20))
        await writer.drain()
        folder = tmp_path / "files"
        await until(lambda: bool([*folder.rglob("*.part")]))
        writer.transport.abort()
        await until(lambda: not [*folder.rglob("*.part")])


def kept(store: FileStore, tenant: str, expires_at: int) -> FileObject:
    file = FileObject(f"file-{expires_at:024x}", 3, 0, expires_at, "a", "batch")
    path = store.begin(tenant, file.id)
    path.write_bytes(b"abc")
    store.keep(tenant, path, file)
    return file


def test_a_sweep_removes_what_has_expired_and_what_was_left(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    folder_id(tmp_path)
    files = [kept(store, "acme", at) for at in (10, 20, 30)]
    left = store.begin("acme", "file-left")
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    assert store.sweep("acme", {files[0].id}, 20.0) == 1
    assert store.ids("acme") == [files[0].id, files[2].id]
    assert left.exists()
    store.sweep("acme", (), 1e6)
    assert [*store.folder("acme", "files").iterdir()] == []
    assert store.tenants() == ["acme"]


def test_folders_tell_themselves_apart(tmp_path: Path) -> None:
    first = folder_id(tmp_path / "a")
    assert first == folder_id(tmp_path / "a")
    assert first != folder_id(tmp_path / "b")


def test_a_disk_keeps_space(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    folder_id(tmp_path)
    plenty = StorageLimits(1, 1 << 60)
    store.check_room("", plenty, 1, 0)
    with pytest.raises(Exception, match="full"):
        store.check_room("", plenty, 1, 1 << 55)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "upload.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\in.jsonl", "in.jsonl"),
        ("a\r\nb\x00", "ab"),
        ("x" * 400, "x" * 255),
    ],
)
def test_names(given: str | None, shown: str) -> None:
    assert name_of(given) == shown
