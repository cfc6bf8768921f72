"""Reads a request's pictures: their bytes, digests and sizes. Nothing is decoded here."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from loraplex.router.api.request.pictures import data_of, is_address
from loraplex.router.call import GivenPicture, RequestError
from loraplex.router.pictures.fetcher import PictureFetcher
from loraplex.router.pictures.uploaded import UploadedPictures
from loraplex.router.text.model import TextModel
from loraplex.server.protocol import (
    UNBOUNDED,
    Grid,
    PixelBounds,
    VisionCard,
    read_picture_head,
)

# Characters of a data URL that cost as much time as one of a text that is encoded.
_CHARACTERS = 64
MAX_REQUEST_BYTES = 64 << 20

T = TypeVar("T")


class Picture(msgspec.Struct, frozen=True):
    """A picture of a request. digest: SHA-256 of the file. grid: its patches. where: its place in
    the body, the first that has it. pixels: as of `PictureSpan`."""

    digest: str
    data: bytes
    grid: Grid
    where: str = ""
    pixels: PixelBounds = UNBOUNDED


class PictureReader:
    """Reads pictures. fetcher: of those named by address. uploaded: of those named by file."""

    def __init__(self, fetcher: PictureFetcher, uploaded: UploadedPictures) -> None:
        self._fetcher = fetcher
        self._uploaded = uploaded
        self._room = MAX_REQUEST_BYTES
        self._found: dict[tuple[str, str | None, PixelBounds], Picture] = {}

    def of(self, tenant: str) -> "PictureReader":
        """Returns the reader of a new request of the tenant's."""
        return PictureReader(self._fetcher, self._uploaded.of(tenant))

    async def read(
        self, given: Sequence[GivenPicture], model: TextModel, vision: VisionCard
    ) -> list[Picture]:
        """The pictures, in order. What a request names twice is read once. Raises RequestError
        (invalid_image, unavailable, overloaded, and for files file_not_found, unsupported)."""
        if not any(map(is_address, given)):
            return await self._read_all(given, model, vision)
        async with model.turns.take("images"):
            return await self._read_all(given, model, vision)

    async def close(self) -> None:
        await self._fetcher.close()

    async def _read_all(
        self, given: Sequence[GivenPicture], model: TextModel, vision: VisionCard
    ) -> list[Picture]:
        names = [(one.url, one.file_id, one.pixels) for one in given]
        for name, one in zip(names, given, strict=True):
            if name in self._found:
                continue
            picture = self._found[name] = await self._read(one, model, vision)
            self._room -= len(picture.data)
            if self._room < 0:
                most = f"at most {MAX_REQUEST_BYTES} bytes in all"
                message = f"`{one.where}`: the images of a request have {most}"
                raise RequestError("invalid_image", message, param=one.where)
        return [self._found[name] for name in names]

    async def _read(self, one: GivenPicture, model: TextModel, vision: VisionCard) -> Picture:
        data = await self._data(one, model)
        size = len(data) // _CHARACTERS
        return await model.turns.run(size, _blaming(one.where, lambda: _picture(data, one, vision)))

    async def _data(self, one: GivenPicture, model: TextModel) -> bytes:
        if one.file_id is not None:
            return await self._uploaded.data(one.file_id, one.where)
        size = len(one.url) // _CHARACTERS
        data = await model.turns.read(size, _blaming(one.where, lambda: data_of(one.url)))
        if data is not None:
            return data
        async with model.turns.take("image"):
            return await self._fetcher.fetch(one.url, one.where)


def _picture(data: bytes, one: GivenPicture, vision: VisionCard) -> Picture:
    """Raises ValueError for what is no picture, or one of an odd shape."""
    head = read_picture_head(data)
    grid = vision.bounded(one.pixels).grid(head.width, head.height)
    return Picture(hashlib.sha256(data).hexdigest(), data, grid, one.where, one.pixels)


def _blaming(where: str, work: Callable[[], T]) -> Callable[[], T]:
    def blamed() -> T:
        try:
            return work()
        except ValueError as error:
            raise RequestError("invalid_image", f"`{where}`: {error}", param=where) from None

    return blamed
