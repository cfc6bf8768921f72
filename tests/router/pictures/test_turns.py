"""Fetches take turns by tenant: a slow host of one holds no other tenant up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from loraplex.router.call import GivenPicture
from loraplex.router.pictures.fetcher import PictureFetcher
from loraplex.router.pictures.reader import Picture, PictureReader
from loraplex.router.pictures.uploaded import UploadedPictures
from loraplex.router.text.model import TextModel
from loraplex.router.text.turn_taking import FETCHES, ROOMS, TurnTaking
from tests.router.pictures.seeing import SMALL, seeing_card

SLOW, QUICK = "https://slow.test/a.png", "https://quick.test/a.png"


class Web(PictureFetcher):
    """SLOW never answers. running: its fetches under way. most: the most of them at a time."""

    def __init__(self) -> None:
        super().__init__([])
        self.running = self.most = 0
        self.full = asyncio.Event()

    async def fetch(self, url: str, where: str) -> bytes:
        if url == QUICK:
            return SMALL
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == ROOMS["image"].of_one:
            self.full.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
        raise AssertionError


class Callers:
    """Requests of several tenants at one router."""

    def __init__(self) -> None:
        self.web = Web()
        self._reader = PictureReader(self.web, UploadedPictures(None, 0))
        self._taking = TurnTaking()
        self._text = TextModel(seeing_card())
        self.asked: list[asyncio.Task[list[Picture]]] = []

    def ask(self, tenant: str, url: str, is_batch: bool = False) -> asyncio.Task[list[Picture]]:
        model = self._text.taking(self._taking.of(tenant, is_batch))
        vision = model.card.vision
        assert vision is not None
        reading = self._reader.of(tenant).read([GivenPicture(url, "here")], model, vision)
        self.asked.append(asyncio.create_task(reading))
        return self.asked[-1]


@pytest.fixture
async def callers() -> AsyncIterator[Callers]:
    callers = Callers()
    yield callers
    for task in callers.asked:
        task.cancel()
    await asyncio.gather(*callers.asked, return_exceptions=True)
    await callers.web.close()


async def test_a_tenant_whose_host_is_slow_holds_up_no_other(callers: Callers) -> None:
    for _ in range(2 * ROOMS["images"].size):
        callers.ask("a", SLOW)
    await callers.web.full.wait()
    for tenant in ("b", "c", "b"):
        assert [picture.data for picture in await callers.ask(tenant, QUICK)] == [SMALL]
    assert callers.web.most == ROOMS["image"].of_one < FETCHES


async def test_batches_leave_room_for_live_requests(callers: Callers) -> None:
    for tenant in ("a", "b", "c", "d") * ROOMS["images"].size:
        callers.ask(tenant, SLOW, is_batch=True)
    await callers.web.full.wait()
    await callers.ask("e", QUICK)


async def test_whoever_leaves_gives_up_the_turn(callers: Callers) -> None:
    first = [callers.ask("a", SLOW) for _ in range(ROOMS["image"].of_one)]
    second = callers.ask("a", QUICK)
    await callers.web.full.wait()
    for task in first:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await second
    assert callers.web.running == 0
