"""Sends the files of uploads to workers that do not have them."""

import asyncio
import ssl
from collections.abc import Sequence
from functools import cached_property, partial

import httpx

from loraplex.adapters.common.authorities import trusted_context
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.uploads.archive import adapter_files, archive_stream
from loraplex.adapters.uploads.shelf import UploadShelf
from loraplex.router.http.client import http_client

_TIMEOUT_S = 60.0
_RETRY_S = 1.0


class UploadCourier:
    """Brings uploads from this router's shelf to workers, each once at a time."""

    def __init__(self, shelf: UploadShelf) -> None:
        self._shelf = shelf
        self._sending: dict[tuple[str, str], asyncio.Task[None]] = {}

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        """Made once, and not before it is needed: it takes long."""
        return trusted_context()

    async def deliver(self, worker: str, secret: str, digests: Sequence[str]) -> None:
        """Sends uploads to a worker. worker: http://host:port. Raises AdapterError."""
        for digest in digests:
            key = worker, digest
            task = self._sending.get(key)
            if task is None:
                task = asyncio.create_task(self._send(worker, secret, digest))
                self._sending[key] = task
                task.add_done_callback(partial(self._sent, key))
            await asyncio.shield(task)

    def _sent(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._sending.pop(key, None)
        if not task.cancelled():
            task.exception()  # every waiter may have left: it counts as seen

    async def _send(self, worker: str, secret: str, digest: str) -> None:
        folder = await asyncio.to_thread(self._shelf.find, digest)
        if folder is None:
            message = "the files of this upload are not here any more; upload the adapter again"
            raise AdapterError("unavailable", message, (), _RETRY_S)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        try:
            async with http_client(_TIMEOUT_S, trusted=self._trusted) as client:
                url = f"{worker}/uploads/{digest}"
                body = archive_stream(adapter_files(folder))
                answer = await client.put(url, content=body, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            message = f"the upload could not be sent to the worker: {type(error).__name__}"
            raise AdapterError("unavailable", message, (), _RETRY_S) from error
        if answer.status_code != 204:
            message = f"the worker did not take the upload (HTTP {answer.status_code})"
            raise AdapterError("unavailable", message, (), _RETRY_S)
