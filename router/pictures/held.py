"""Pictures' files that requests under way may need again, and the way to workers that lack them."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import httpx

from loraplex.adapters.common.authorities import trusted_context
from loraplex.router.http.client import http_client
from loraplex.router.pictures.reader import Picture

_TIMEOUT_S = 60.0


class NotBrought(Exception):
    """A worker could not be sent a picture; str() says why."""


class HeldPictures:
    """Keeps the files of pictures as long as a request holds them, each once."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._holders: Counter[str] = Counter()
        self._sending: dict[tuple[str, str], asyncio.Task[None]] = {}

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        """Made once, and not before it is needed: it takes long."""
        return trusted_context()

    def hold(self, pictures: Iterable[Picture]) -> Callable[[], None]:
        """Keeps pictures until what is returned is called."""
        held = {picture.digest: picture.data for picture in pictures}
        self._files |= held
        self._holders.update(held.keys())
        return partial(self._release, tuple(held))

    async def deliver(self, worker: str, secret: str, digests: Sequence[str]) -> None:
        """Sends files to a worker; those that nobody holds any more are left out. worker:
        http://host:port. Raises NotBrought."""
        for digest in digests:
            data = self._files.get(digest)
            if data is None:
                continue
            key = worker, digest
            task = self._sending.get(key)
            if task is None:
                task = asyncio.create_task(self._send(worker, secret, digest, data))
                self._sending[key] = task
                task.add_done_callback(partial(self._sent, key))
            await asyncio.shield(task)

    def _release(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest], self._files[digest]

    def _sent(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._sending.pop(key, None)
        if not task.cancelled():
            task.exception()  # every waiter may have left: it counts as seen

    async def _send(self, worker: str, secret: str, digest: str, data: bytes) -> None:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        try:
            async with http_client(_TIMEOUT_S, trusted=self._trusted) as client:
                url = f"{worker}/pictures/{digest}"
                answer = await client.put(url, content=data, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise NotBrought(f"the image could not be sent: {type(error).__name__}") from error
        if answer.status_code != 204:
            raise NotBrought(f"the worker did not take the image (HTTP {answer.status_code})")
