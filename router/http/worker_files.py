"""Files on their way to workers."""

import ssl
from collections.abc import AsyncIterable
from functools import cached_property

import httpx

from loraplex.adapters.common.authorities import trusted_context
from loraplex.adapters.errors import AdapterError
from loraplex.router.http.client import http_client

_TIMEOUT_S = 60.0
RETRY_S = 1.0


class WorkerFiles:
    """Puts files to the HTTP address of workers. what: names one of them in errors."""

    def __init__(self, what: str) -> None:
        self._what = what

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        """Made once, and not before it is needed: it takes long."""
        return trusted_context()

    async def put(self, url: str, secret: str, content: bytes | AsyncIterable[bytes]) -> None:
        """Sends one file. Raises AdapterError."""
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        try:
            async with http_client(_TIMEOUT_S, trusted=self._trusted) as client:
                answer = await client.put(url, content=content, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            message = f"the {self._what} could not be sent to the worker: {type(error).__name__}"
            raise AdapterError("unavailable", message, (), RETRY_S) from error
        if answer.status_code != 204:
            message = f"the worker did not take the {self._what} (HTTP {answer.status_code})"
            raise AdapterError("unavailable", message, (), RETRY_S)
