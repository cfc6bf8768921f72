"""`loraplex batch` against a router before a worker with scripted answers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.batch import job as batch_job
from loraplex.launcher.batch.job import BatchJob
from loraplex.router.lines.errors import BatchError
from loraplex.router.lines.line_files import BatchInput, Journal
from loraplex.router.lines.records import BatchRecord
from loraplex.router.policy.batch_limits import BatchLimits
from tests.launcher.batch.batch_files import chat, line, numbers, records, write
from tests.launcher.load_server import serving, whole
from tests.router.batches.running_batches import BatchUser, Held, until
from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.serving import Running, running_router

ADAPTERS = ("alpha", "beta")


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with running_worker(FakeWorker()) as worker:
        yield worker


@pytest.fixture
async def router(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Running]:
    names = tuple(f"{name}=hub:org/{name}" for name in ADAPTERS)
    files = tmp_path / "files"
    async with running_router(tmp_path, worker, adapters=names, files_dir=files) as running:
        yield running


class Files:
    def __init__(self, folder: Path) -> None:
        self.input, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.errors, self.running = folder / "errors.jsonl", folder / "running"

    @contextmanager
    def job(self, url: str, api_key: str = "") -> Iterator[BatchJob]:
        source = BatchInput(self.input)
        journal = Journal(self.out, self.errors, source, restart=False)
        job = BatchJob(source, journal, self.running, api_key)
        job.server_ready(url)
        yield job
        journal.close()
        source.close()

    async def run(self, url: str, api_key: str = "") -> None:
        with self.job(url, api_key) as job:
            await job.run()
        if job.failure is not None:
            raise job.failure


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def url_of(router: Running) -> str:
    return str(router.client.base_url)


def lines(count: int) -> list[bytes]:
    """Adapters and routes take turns."""
    asked = [(ADAPTERS[i % 2], ("/v1/completions", "/generate")[i // 2 % 2]) for i in range(count)]
    return [line(f"{i}", url, body(name, url)) for i, (name, url) in enumerate(asked)]


def body(adapter: str, url: str) -> dict[str, object]:
    if url == "/generate":
        return {"inputs": "hello", "parameters": {"adapter_id": adapter, "max_new_tokens": 40}}
    return {"model": adapter, "prompt": "hello", "max_tokens": 40}


async def test_lines_of_several_routes(
    router: Running, worker: FakeWorker, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "PART_LINES", 4)
    bad = [b"nonsense", b"", line("0", "/generate", {"inputs": "x"})]
    write(files.input, [*lines(12), *bad, chat("missing", "missing-adapter")])
    await files.run(url_of(router))
    assert numbers(files.out) == [*range(1, 13)]
    for record in records(files.out):
        assert record["custom_id"] == str(int(record["id"].split("_")[2]) - 1)
        assert (record["response"]["status_code"], record["error"]) == (200, None)
    failed = {one["id"].split("_")[2]: one for one in records(files.errors)}
    assert failed["13"]["error"]["code"] == "invalid_json"
    assert failed["15"]["error"]["code"] == "duplicate_custom_id"
    assert failed["16"]["response"]["status_code"] == 404
    assert sorted(failed) == ["13", "15", "16"]
    user = BatchUser(router)
    assert (await user.call("GET", "/v1/files"))["data"] == [], "the command leaves none"
    assert len((await user.call("GET", "/v1/batches"))["data"]) == 5, "of four lines at the most"
    await files.run(url_of(router))
    assert len(worker.requests) == 12, "answered lines are not asked again"


async def test_a_killed_command_goes_on_with_the_server_s_batch(
    router: Running, worker: FakeWorker, files: Files
) -> None:
    held = Held(worker)
    write(files.input, lines(4))
    with files.job(url_of(router)) as job:
        running = asyncio.create_task(job.run())
        await until(lambda: len(worker.requests) == 2 and files.running.exists())
        job.kill()
        await running
    assert (files.out.read_bytes(), job.failure) == (b"", None)
    held.open.set()
    await files.run(url_of(router))
    assert (numbers(files.out), len(worker.requests)) == ([1, 2, 3, 4], 4)


async def test_a_stop_cancels_and_keeps_what_is_answered(
    router: Running, worker: FakeWorker, files: Files
) -> None:
    held = Held(worker)
    write(files.input, [chat("a", BASE_NAME), chat("missing", "missing-adapter"), *lines(4)])
    with files.job(url_of(router)) as job:
        running = asyncio.create_task(job.run())
        await until(lambda: len(worker.requests) == 1 and files.running.exists())
        await job.stop()
        await running
    (failed,) = records(files.errors)
    assert (failed["response"]["status_code"], files.out.read_bytes()) == (404, b"")
    held.open.set()
    await files.run(url_of(router))
    assert numbers(files.out) == [1, 3, 4, 5, 6]


async def test_a_batch_that_fails_as_a_whole(
    tmp_path: Path, worker: FakeWorker, files: Files
) -> None:
    write(files.input, lines(8))
    limits = BatchLimits(max_lines=3)
    async with running_router(
        tmp_path, worker, files_dir=tmp_path / "files", batch=limits
    ) as router:
        with pytest.raises(BatchError, match="failed: .*there are more than 3 lines"):
            await files.run(url_of(router))
    assert (files.out.read_bytes(), files.errors.read_bytes()) == (b"", b"")


@pytest.mark.parametrize("name", ["batch_req_abc123", "batch_req_1_6f3a", "1"])
def test_an_answer_of_no_line(files: Files, name: str) -> None:
    write(files.input, lines(1))
    with files.job("http://127.0.0.1:1") as job, pytest.raises(BatchError, match="says no line"):
        job._append(BatchRecord(name, "0", None, None))


async def test_a_server_without_batches(tmp_path: Path, worker: FakeWorker, files: Files) -> None:
    write(files.input, lines(2))
    async with running_router(tmp_path, worker) as router:
        with pytest.raises(BatchError, match="runs no batch: .* without --files-dir"):
            await files.run(url_of(router))


async def test_no_server(files: Files) -> None:
    write(files.input, lines(2))
    with pytest.raises(BatchError, match=r"no server answers at http://127\.0\.0\.1:1 "):
        await files.run("http://127.0.0.1:1")


async def test_a_key_that_is_refused(tmp_path: Path, worker: FakeWorker, files: Files) -> None:
    write(files.input, lines(2))
    async with running_router(tmp_path, worker, auth="keys", admin_key="k" * 32) as router:
        with pytest.raises(BatchError, match="refuses the key: "):
            await files.run(url_of(router), "sk-nobody")


async def test_a_busy_server_is_asked_again_for_a_while(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "_POLL_S", 0.0)
    write(files.input, lines(2))
    with serving() as server:
        busy = whole(503, b'{"error": "no worker is ready"}')
        server.say = lambda number, asked: busy if number < 3 else whole(400, b'{"error": "odd"}')
        with pytest.raises(BatchError, match="runs no batch: odd"):
            await files.run(server.url)
        assert len([asked for asked in server.asked if asked.method == "POST"]) == 4
        monkeypatch.setattr(batch_job, "_PATIENCE_S", -1.0)
        server.say = lambda number, asked: busy
        with pytest.raises(BatchError, match="answers nobody any more: 503 no worker is ready"):
            await files.run(server.url)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-memory", "1GB"], "--kv-memory is of a server that batch starts"),
        (["--model", "m"], "--model is of a server that batch starts"),
        (["--share-prefixes"], "--share-prefixes is of a server that batch starts"),
        (["--errors", "{out}"], "IN, --out and --errors must be three files"),
        (["--url", "ftp://x"], "expected http://host:port"),
        (["--concurrency", "8"], "--batch-rows"),
    ],
)
def test_misuse(
    tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write(tmp_path / "in.jsonl", [chat("a")]), tmp_path / "out.jsonl"
    options = [option.format(out=out) for option in options]
    with pytest.raises(SystemExit) as left:
        main(["batch", str(source), "--out", str(out), "--url", "http://127.0.0.1:1", *options])
    assert left.value.code == 2
    assert words in capsys.readouterr().err
    assert not out.exists()
