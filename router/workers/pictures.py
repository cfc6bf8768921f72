"""The last picture of one worker's arenas; asked for only while somebody watches."""

import asyncio
from collections.abc import Callable

from loraplex.server.protocol import AdapterPlace, Inspect, WorkerPicture


class WorkerPictures:
    """Pictures of the worker behind one connection.

    `send` puts a frame on the wire; it may raise what ends a connection. places: of the newest
    picture that had any; the same tuple for as long as nothing changes.
    """

    def __init__(self, send: Callable[[Inspect], None]) -> None:
        self.latest: WorkerPicture | None = None
        self.places: tuple[AdapterPlace, ...] = ()
        self._send = send
        self._awaited: asyncio.Future[None] | None = None
        self._asked = 0

    async def look(self) -> None:
        """Until a picture has come; callers at once share it. Raises what `fail` was given."""
        if self._awaited is None:
            known = 0 if self.latest is None else self.latest.version
            self._asked += 1
            self._send(Inspect(f"p{self._asked}", known))
            self._awaited = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._awaited)

    def on_picture(self, picture: WorkerPicture) -> None:
        self.latest = picture
        if picture.places is not None:
            self.places = picture.places
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def fail(self, error: Exception) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited.done():
            awaited.set_exception(error)
            awaited.exception()  # whoever waited may have left: it counts as seen
