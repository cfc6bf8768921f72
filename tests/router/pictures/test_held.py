"""Pictures on their way to a worker: whole, and as long as a request holds them."""

import hashlib
from unittest.mock import Mock

import httpx
import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.uploads.shelf import UploadShelf
from loraplex.router.pictures.held import HeldPictures
from loraplex.router.pictures.reader import Picture
from loraplex.server.protocol import MAX_PICTURE_BYTES
from tests.router.pictures.seeing import SMALL, WIDE
from tests.router.uploads.test_courier import SECRET, worker_with

PICTURES = [Picture(hashlib.sha256(data).hexdigest(), data, (1, 4, 4)) for data in (SMALL, WIDE)]
DIGESTS = [picture.digest for picture in PICTURES]


async def test_a_worker_gets_what_is_held() -> None:
    held = HeldPictures()
    release, again = held.hold(PICTURES), held.hold(PICTURES[:1])
    service = Mock()
    async with worker_with(Mock(spec=UploadShelf), service) as address:
        await held.deliver(address, SECRET, DIGESTS)
        assert [call.args for call in service.arrived.mock_calls] == [
            (picture.digest, picture.data) for picture in PICTURES
        ]
        release()
        service.reset_mock()
        await held.deliver(address, SECRET, DIGESTS)
        assert [call.args[0] for call in service.arrived.mock_calls] == DIGESTS[:1]
        again()
        service.reset_mock()
        await held.deliver(address, SECRET, DIGESTS)
        assert not service.arrived.mock_calls


async def test_what_cannot_be_brought_is_said() -> None:
    held = HeldPictures()
    held.hold(PICTURES)
    async with worker_with(Mock(spec=UploadShelf), None) as address:
        for secret, status in (("wrong", 401), (SECRET, 404)):
            with pytest.raises(AdapterError, match=f"HTTP {status}"):
                await held.deliver(address, secret, DIGESTS)
    with pytest.raises(AdapterError, match="ConnectError"):
        await held.deliver(address, SECRET, DIGESTS)


async def test_a_worker_takes_no_other_bytes() -> None:
    service, headers = Mock(), {"authorization": f"Bearer {SECRET}"}
    async with (
        worker_with(Mock(spec=UploadShelf), service) as address,
        httpx.AsyncClient(headers=headers) as client,
    ):
        wrong = await client.put(f"{address}/pictures/{DIGESTS[0]}", content=WIDE)
        assert wrong.status_code == 400
        large = await client.put(
            f"{address}/pictures/{DIGESTS[0]}", content=bytes(MAX_PICTURE_BYTES + 1)
        )
        assert large.status_code == 413
    assert not service.arrived.mock_calls
