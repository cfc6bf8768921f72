"""Reads a request's pictures: their bytes, digests and sizes. Nothing is decoded here."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from loraplex.router.api.request.pictures import GivenPicture, data_of
from loraplex.router.call import RequestError
from loraplex.router.pictures.fetcher import PictureFetcher
from loraplex.router.text.model import TextModel
from loraplex.server.protocol import Grid, VisionCard, read_picture_head

# Characters of a data URL that cost as much time as one of a text that is encoded.
_CHARACTERS = 64

T = TypeVar("T")


class Picture(msgspec.Struct, frozen=True):
    """A picture of a request. digest: SHA-256 of the file. grid: its patches."""

    digest: str
    data: bytes
    grid: Grid


class PictureReader:
    """Reads pictures. fetcher: of those that a request names by their addresses."""

    def __init__(self, fetcher: PictureFetcher) -> None:
        self._fetcher = fetcher

    async def read(
        self, given: Sequence[GivenPicture], model: TextModel, vision: VisionCard
    ) -> list[Picture]:
        """The pictures, in order. Raises RequestError (invalid_image, unavailable)."""
        return [await self._read(one, model, vision) for one in given]

    async def close(self) -> None:
        await self._fetcher.close()

    async def _read(self, one: GivenPicture, model: TextModel, vision: VisionCard) -> Picture:
        size = len(one.url) // _CHARACTERS
        data = await model.turns.run(size, _blaming(one.where, lambda: data_of(one.url)))
        if data is None:
            data = await self._fetcher.fetch(one.url, one.where)
        file = data
        return await model.turns.run(size, _blaming(one.where, lambda: _picture(file, vision)))


def _picture(data: bytes, vision: VisionCard) -> Picture:
    """Raises ValueError for what is no picture, or one of an odd shape."""
    head = read_picture_head(data)
    grid = vision.grid(head.width, head.height)
    return Picture(hashlib.sha256(data).hexdigest(), data, grid)


def _blaming(where: str, work: Callable[[], T]) -> Callable[[], T]:
    def blamed() -> T:
        try:
            return work()
        except ValueError as error:
            raise RequestError("invalid_image", f"`{where}`: {error}", param=where) from None

    return blamed
