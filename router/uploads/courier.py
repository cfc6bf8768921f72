"""Sends the files of uploads to workers that do not have them."""

import asyncio
from collections.abc import Sequence
from functools import partial

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.uploads.archive import adapter_files, archive_stream
from loraplex.adapters.uploads.shelf import UploadShelf
from loraplex.router.http.worker_files import RETRY_S, WorkerFiles
from loraplex.router.shared_tasks import SharedTasks


class UploadCourier:
    """Brings uploads from this router's shelf to workers, each once at a time."""

    def __init__(self, shelf: UploadShelf) -> None:
        self._shelf = shelf
        self._sending = SharedTasks[tuple[str, str], None]()
        self._workers = WorkerFiles("upload")

    async def deliver(self, worker: str, secret: str, digests: Sequence[str]) -> None:
        """Sends uploads to a worker. worker: http://host:port. Raises AdapterError."""
        for digest in digests:
            send = partial(self._send, worker, secret, digest)
            await self._sending.run((worker, digest), send)

    async def _send(self, worker: str, secret: str, digest: str) -> None:
        folder = await asyncio.to_thread(self._shelf.find, digest)
        if folder is None:
            message = "the files of this upload are not here any more; upload the adapter again"
            raise AdapterError("unavailable", message, (), RETRY_S)
        body = archive_stream(adapter_files(folder))
        await self._workers.put(f"{worker}/uploads/{digest}", secret, body)
