"""`/v1/files` and `/v1/batches` of a router before a worker with scripted answers."""

import asyncio
import json
import math
import os
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from loraplex.router.batches.folder import BatchFolder
from loraplex.router.batches.run import BatchRun
from loraplex.router.batches.state import BatchState
from loraplex.router.lines.line_files import BatchInput
from loraplex.router.policy.batch_limits import BatchLimits
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.batches.running_batches import ROUTE, BatchUser, Held, line, until
from tests.router.fake_worker import BASE_NAME, FakeWorker
from tests.router.serving import Running, poll, running_router

ADAPTERS = ("alpha", "beta", "gamma")


@pytest.fixture
async def router(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Running]:
    adapters = tuple(f"{name}=hub:org/{name}" for name in ADAPTERS)
    async with running_router(
        tmp_path, worker, adapters=adapters, files_dir=tmp_path / "files"
    ) as running:
        yield running


@pytest.fixture
def user(router: Running) -> BatchUser:
    return BatchUser(router)


async def test_the_event_loop_waits_for_no_disk(
    user: BatchUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take seconds for what was written last."""
    synced, fsync = list[int](), os.fsync

    def record(fd: int) -> None:
        synced.append(threading.get_ident())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    made = await user.start([line("one", "alpha")])
    assert (await user.until_over(made["id"]))["status"] == "completed"
    assert synced
    assert threading.get_ident() not in synced


async def test_inputs_are_read_through_one_at_a_time(
    user: BatchUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, read = list[str](), threading.Event(), BatchRun._read_input

    def held(run: BatchRun) -> BatchInput:
        begun.append(run.state.id)
        assert go_on.wait(240)
        return read(run)

    monkeypatch.setattr(BatchRun, "_read_input", held)
    made = [(await user.start([line("one", "alpha")]))["id"] for _ in range(4)]
    await until(lambda: bool(begun))
    assert len(begun) == 1
    go_on.set()
    for one in made:
        assert (await user.until_over(one))["status"] == "completed"
    assert sorted(begun) == sorted(made)


async def test_every_line_is_answered_adapter_by_adapter(
    user: BatchUser, worker: FakeWorker
) -> None:
    good = [line(f"{i}", ADAPTERS[i % 3]) for i in range(60)]
    bad = [
        b"nonsense",
        line("1", "alpha"),
        line("nobody", "missing-adapter"),
        line("value", top_p=7),
        {**line("where"), "url": "/v1/chat/completions"},
        line("flow", stream=True),
    ]
    made = await user.start([*good, b"", *bad], metadata={"who": "me"})
    assert (made["object"], made["status"], made["errors"]) == ("batch", "validating", None)
    assert made["expires_at"] == made["created_at"] + 86400
    over = await user.until_over(made["id"])
    assert (over["status"], over["metadata"]) == ("completed", {"who": "me"})
    assert over["request_counts"] == {"total": 66, "completed": 60, "failed": 6}
    assert over["created_at"] <= over["in_progress_at"] <= over["finalizing_at"]
    assert over["finalizing_at"] <= over["completed_at"]
    answers = await user.answers(over["output_file_id"])
    assert sorted(answers) == sorted(one["custom_id"] for one in good)
    for i in range(60):
        response = answers[f"{i}"]["response"]
        assert response["status_code"] == 200
        assert response["request_id"]
        assert response["body"]["model"] == ADAPTERS[i % 3]
    failed = await user.answers(over["error_file_id"])
    codes = {name: one["error"] and one["error"]["code"] for name, one in failed.items()}
    assert codes == {
        None: "invalid_json",
        "1": "duplicate_custom_id",
        "nobody": None,
        "value": None,
        "where": "invalid_url",
        "flow": "stream_not_supported",
    }
    assert failed["nobody"]["response"]["status_code"] == 404
    assert failed["value"]["response"]["status_code"] == 400
    asked = [request.adapter for request in worker.requests]
    assert len(asked) == 60
    assert sum(one != other for one, other in pairwise(asked)) == 2
    # Behind all who wait for their answer.
    assert min(request.priority for request in worker.requests) >= 1000


async def test_lists_go_on_page_by_page(user: BatchUser) -> None:
    made = [(await user.start([line("a")]))["id"] for _ in range(5)]
    for batch_id in made:
        await user.until_over(batch_id)
    for path, most in (("/v1/batches", 5), ("/v1/files?purpose=batch_output", 5)):
        seen: list[str] = []
        separator = "&" if "?" in path else "?"
        after = ""
        while True:
            page = await user.call("GET", f"{path}{separator}limit=2{after}")
            seen += [one["id"] for one in page["data"]]
            assert (page["first_id"], page["last_id"]) == (seen[-len(page["data"])], seen[-1])
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert seen == sorted(set(seen), reverse=True)
        assert len(seen) == most
    assert [one["id"] for one in (await user.call("GET", "/v1/batches"))["data"]] == made[::-1]
    empty = await user.call("GET", "/v1/files?purpose=fine-tune")
    assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)


async def test_a_cancelled_batch_tells_every_line(user: BatchUser, worker: FakeWorker) -> None:
    held = Held(worker)
    made = await user.start([line(f"{i}") for i in range(100)])
    await worker.until(lambda: len(worker.requests) >= 10)
    path = f"/v1/files/{made['input_file_id']}"
    assert (await user.call("DELETE", path, 409))["error"]["code"] == "conflict"
    cancelling = await user.call("POST", f"/v1/batches/{made['id']}/cancel")
    assert cancelling["status"] == "cancelling"
    over = await user.until_over(made["id"])
    assert over["status"] == "cancelled"
    assert over["cancelling_at"] <= over["cancelled_at"]
    assert over["request_counts"] == {"total": 100, "completed": 0, "failed": 100}
    assert over["output_file_id"] is None
    failed = await user.answers(over["error_file_id"])
    assert {one["error"]["code"] for one in failed.values()} == {"batch_cancelled"}
    assert len(failed) == 100
    await user.call("POST", f"/v1/batches/{made['id']}/cancel", 409)
    assert (await user.call("DELETE", path))["deleted"] is True
    await user.call("GET", path, 404)
    held.open.set()


async def test_a_batch_that_expires(
    user: BatchUser, worker: FakeWorker, router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    Held(worker)
    made = await user.start([line(f"{i}") for i in range(3)], completion_window="1h")
    await worker.until(lambda: len(worker.requests) == 3)
    now = made["expires_at"] + 1
    monkeypatch.setattr("loraplex.router.batches.keeper.time.time", lambda: now)
    over = await user.until_over(made["id"])
    assert (over["status"], over["completed_at"]) == ("expired", None)
    assert over["expired_at"] == now
    failed = await user.answers(over["error_file_id"])
    assert [one["error"]["code"] for one in failed.values()] == ["batch_expired"] * 3


async def test_an_end_is_not_shown_before_it_is_noted(
    user: BatchUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting, go = threading.Event(), threading.Event()
    end = BatchFolder.end

    def late(folder: BatchFolder, state: BatchState) -> None:
        noting.set()
        assert go.wait(60)
        end(folder, state)

    monkeypatch.setattr(BatchFolder, "end", late)
    made = await user.start([line("one")])
    await until(noting.is_set)
    assert (await user.batch(made["id"]))["status"] == "finalizing"
    go.set()
    assert (await user.until_over(made["id"]))["status"] == "completed"


async def test_counts_never_go_back(
    user: BatchUser, router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch ends while its note is read, which is older than what was shown before."""
    monkeypatch.setattr("loraplex.router.batches.run._NOTE_S", math.inf)
    desk, held = router.service.batches, Held(worker)
    assert desk is not None
    made = await user.start([b"nonsense", line("one")])

    async def one_failed() -> bool:
        failed: int = (await user.batch(made["id"]))["request_counts"]["failed"]
        return failed == 1

    await poll(one_failed)
    read, go = threading.Event(), threading.Event()
    get = BatchFolder.get

    def late(folder: BatchFolder, tenant: str, batch_id: str) -> BatchState:
        state = get(folder, tenant, batch_id)
        read.set()
        assert go.wait(60)
        return state

    monkeypatch.setattr(BatchFolder, "get", late)
    asked = asyncio.create_task(user.batch(made["id"]))
    await until(read.is_set)
    held.open.set()
    await until(lambda: desk.keeper.state(made["id"]) is None)
    go.set()
    assert (await asked)["request_counts"]["failed"] == 1


async def test_batches_stand_back_behind_live_requests(tmp_path: Path, worker: FakeWorker) -> None:
    held = Held(worker)
    async with running_router(
        tmp_path, worker, files_dir=tmp_path / "files", batch=BatchLimits(rows=12, live_rows=3)
    ) as router:
        user = BatchUser(router)
        live = asyncio.create_task(
            router.client.post(ROUTE, json={"model": BASE_NAME, "prompt": "live"})
        )
        await worker.until(lambda: len(worker.requests) == 1)
        desk = router.service.batches
        assert desk is not None
        await until(lambda: desk.keeper.rows.live)
        made = await user.start([line(f"{i}", n=1 + i % 2) for i in range(40)])
        await worker.until(lambda: len(worker.requests) == 4)
        assert await router.metric("loraplex_batch_rows_limit") == 3
        held.open.set()
        assert (await live).status_code == 200
        held.open.clear()
        await until(lambda: desk.keeper.rows.running >= 11)
        assert desk.keeper.rows.running <= 12
        held.open.set()
        over = await user.until_over(made["id"])
        assert over["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


async def test_busy_lines_are_asked_again(user: BatchUser, worker: FakeWorker) -> None:
    """A worker that is full refuses; nobody's answer is lost."""
    asked: dict[str, int] = {}

    async def refuse_once(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        asked[request.request_id] = asked.get(request.request_id, 0) + 1
        return "out_of_memory" if len(asked) <= 2 else None

    worker.before_token = refuse_once
    made = await user.start([line(f"{i}") for i in range(6)])
    over = await user.until_over(made["id"])
    assert over["request_counts"] == {"total": 6, "completed": 6, "failed": 0}


@pytest.mark.parametrize(
    ("lines", "code"),
    [([b"", b" "], "empty_file"), ([b"{}"] * 4, "invalid_input_file")],
)
async def test_inputs_that_cannot_be_run(
    tmp_path: Path, worker: FakeWorker, lines: list[bytes], code: str
) -> None:
    async with running_router(
        tmp_path, worker, files_dir=tmp_path / "files", batch=BatchLimits(max_lines=3)
    ) as router:
        user = BatchUser(router)
        over = await user.until_over((await user.start(lines))["id"])
        assert (over["status"], over["failed_at"] is None) == ("failed", False)
        (fault,) = over["errors"]["data"]
        assert (fault["code"], fault["param"]) == (code, "input_file_id")
        assert str(tmp_path) not in json.dumps(over)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "/v1/nowhere"),
        ("endpoint", "/v1/batches"),
        ("completion_window", "24"),
        ("completion_window", "30d"),
        ("metadata", {"a": 1}),
        ("metadata", {f"{i}": "" for i in range(17)}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
        ("nonsense", 1),
    ],
)
async def test_bad_values_are_named(user: BatchUser, field: str, value: object) -> None:
    file = await user.upload(b"{}\n")
    body = {"input_file_id": file["id"], "endpoint": ROUTE, "completion_window": "24h"}
    error = (await user.call("POST", "/v1/batches", 400, json={**body, field: value}))["error"]
    assert field in error["message"]


async def test_files_that_are_not_there(user: BatchUser) -> None:
    body = {"input_file_id": "file-0", "endpoint": ROUTE, "completion_window": "24h"}
    error = (await user.call("POST", "/v1/batches", 404, json=body))["error"]
    assert (error["code"], error["param"]) == ("file_not_found", "input_file_id")
    for path in ("/v1/files/x", "/v1/files/..%2Fid", "/v1/files/x/content"):
        await user.call("GET", path, 404)
    assert (await user.call("GET", "/v1/batches/x", 404))["error"]["code"] == "batch_not_found"


async def test_without_a_folder_the_routes_say_why(tmp_path: Path, worker: FakeWorker) -> None:
    async with running_router(tmp_path, worker) as router:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches")):
            answer = await router.client.request(method, path)
            assert answer.status_code == 501
            assert answer.headers["x-should-retry"] == "false"
            assert "retry-after" not in answer.headers
            assert "--files-dir" in answer.json()["error"]["message"]
