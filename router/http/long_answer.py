"""JSON answers of any length: sent piece by piece, as fast as their readers take them."""

import asyncio
from collections.abc import Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class LongAnswer(Response):
    """Sends a long answer in pieces. Between two of them others have their turn."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
        size = sum(map(len, pieces))
        super().__init__(pieces[0], 200, {**(headers or {}), "content-length": str(size)})
        self._rest = pieces[1:]

    @property
    def whole(self) -> bytes:
        return b"".join((bytes(self.body), *self._rest))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body: bytes | memoryview = self.body
        for piece in self._rest:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)
            body = piece
        await send({"type": "http.response.body", "body": body, "more_body": False})
