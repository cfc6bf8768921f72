"""Work for a client ends when the client leaves, and for no other reason."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from loraplex.router.http.body import ClientGone
from loraplex.router.http.sse import until_disconnect


class Client:
    """Somebody who may leave."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_what_is_done_is_returned_whoever_leaves_later() -> None:
    client = Client()

    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    assert await until_disconnect(client.request, work()) == "done"
    client.left.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_leaving_cancels_the_work_alone() -> None:
    client, ended = Client(), asyncio.Event()

    async def work() -> None:
        client.left.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ClientGone):
        await until_disconnect(client.request, work())
    assert ended.is_set()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_failure_of_work_that_was_cancelled_is_reported() -> None:
    client = Client()

    async def work() -> None:
        client.left.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise LookupError

    with pytest.raises(LookupError):
        await until_disconnect(client.request, work())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_goes_on_although_the_client_leaves() -> None:
    client, begun = Client(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            client.left.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(until_disconnect(client.request, work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
