"""Uploads on their way to a worker: whole, once, and with the digest that they claim."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import uvicorn

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.sources.upload import UploadSource
from loraplex.adapters.uploads.shelf import UploadShelf
from loraplex.router.uploads.courier import UploadCourier
from loraplex.server.worker.app import UploadFace, WorkerApp
from loraplex.server.worker.pictures.service import PictureService
from loraplex.server.worker.worker import Worker
from tests.adapters.uploads.bodies import FILES, archive, unpacked

SECRET = "of the fleet"
LIMIT = 1 << 20


@asynccontextmanager
async def worker_with(
    shelf: UploadShelf, pictures: PictureService | None = None
) -> AsyncIterator[str]:
    """The address of a worker's HTTP face."""
    face = UploadFace(shelf, LIMIT)
    worker = Mock(spec=Worker, pictures=pictures)
    app = WorkerApp(worker, SECRET, face).build()
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    # The socket listens before the server does: nobody has to wait for the start.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def kept(root: Path) -> tuple[UploadShelf, str]:
    """A router's shelf, and the digest of the upload on it."""
    shelf = UploadShelf(root, LIMIT)
    with shelf.staging() as folder:
        digest = unpacked(archive(), folder)
        shelf.keep(folder, digest)
    return shelf, digest


def found(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


async def test_a_worker_is_sent_what_it_lacks(tmp_path: Path) -> None:
    router, digest = kept(tmp_path / "router")
    shelf = UploadShelf(tmp_path / "worker", LIMIT)
    source = UploadSource([shelf])
    ref = AdapterRef("upload", digest)
    with pytest.raises(AdapterError) as refused:
        source.list_files(ref, None)
    assert refused.value.code == "missing"
    async with worker_with(shelf) as address:
        courier = UploadCourier(router)
        sending = [courier.deliver(address, SECRET, [digest]) for _ in range(3)]
        await asyncio.gather(*sending)
    assert source.list_files(ref, None) == {name: len(data) for name, data in FILES.items()}
    for name, content in FILES.items():
        source.fetch_file(ref, None, name, tmp_path)
        assert (tmp_path / name).read_bytes() == content


async def test_what_cannot_be_sent_is_unavailable(tmp_path: Path) -> None:
    router, digest = kept(tmp_path / "router")
    courier = UploadCourier(router)
    async with worker_with(UploadShelf(tmp_path / "worker", LIMIT)) as address:
        for secret, wanted in (("wrong", digest), (SECRET, "0" * 64)):
            with pytest.raises(AdapterError) as refused:
                await courier.deliver(address, secret, [wanted])
            assert refused.value.code == "unavailable"
    with pytest.raises(AdapterError) as refused:
        await courier.deliver(address, SECRET, [digest])
    assert refused.value.code == "unavailable"


async def test_a_worker_keeps_no_files_of_another_digest(tmp_path: Path) -> None:
    shelf = UploadShelf(tmp_path, LIMIT)
    headers = {"authorization": f"Bearer {SECRET}"}
    async with worker_with(shelf) as address, httpx.AsyncClient(headers=headers) as client:
        for digest, body in (("1" * 64, archive()), ("2" * 64, archive()[:900]), ("3" * 64, b"")):
            answer = await client.put(f"{address}/uploads/{digest}", content=body)
            assert answer.status_code == 400, answer.text
    assert found(tmp_path) == {"staging"}
