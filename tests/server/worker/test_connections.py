"""A router's connection over an in-memory WebSocket: a router that does not read is cut off."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketState

from loraplex.server import protocol
from loraplex.server.worker.connections import (
    MAX_BUFFERED_FRAMES,
    TRY_AGAIN_LATER,
    RouterConnection,
)

TIMEOUT_S = 60.0


class Handler:
    """Knows whether the router is there."""

    def __init__(self) -> None:
        self.present = asyncio.Event()

    def hello(self) -> protocol.WorkerHello:
        return protocol.WorkerHello(worker_id="w", epoch=1, card_digest="d", credits=1)

    def connected(self, connection: RouterConnection) -> None:
        self.present.set()

    def router_frame(self, connection: RouterConnection, frame: protocol.RouterFrame) -> None:
        raise AssertionError("no frame was sent")

    def disconnected(self, connection: RouterConnection) -> None:
        self.present.clear()


class Peer:
    """A router's end, which says hello and then reads while `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.got: list[bytes] = []
        self.close_code: int | None = None
        self._unsent = [protocol.encode(protocol.RouterHello("router"))]

    async def receive(self) -> MutableMapping[str, Any]:
        if not self._unsent:
            await asyncio.Event().wait()
        return {"type": "websocket.receive", "bytes": self._unsent.pop()}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "websocket.close":
            self.close_code = message["code"]
        else:
            await self.reads.wait()
            self.got.append(message["bytes"])

    def websocket(self) -> WebSocket:
        websocket = WebSocket({"type": "websocket"}, self.receive, self.send)
        websocket.application_state = websocket.client_state = WebSocketState.CONNECTED
        return websocket


def step(number: int) -> protocol.StepEvents:
    return protocol.StepEvents(number, (protocol.TokenEvent("r", 0, 0, number, (7,)),))


async def serve_until_paused(
    connection: RouterConnection, peer: Peer, handler: Handler
) -> asyncio.Task[None]:
    """Greet the router, which then stops reading. Returns what serves it."""
    served = asyncio.create_task(connection.serve())
    await handler.present.wait()
    peer.reads.clear()
    return served


async def test_a_router_that_does_not_read_is_cut_off() -> None:
    peer, handler = Peer(), Handler()
    connection = RouterConnection(1, peer.websocket(), handler)
    async with asyncio.timeout(TIMEOUT_S):
        served = await serve_until_paused(connection, peer, handler)
        for number in range(MAX_BUFFERED_FRAMES + 2):
            connection.send(step(number))
        await served
    assert peer.close_code == TRY_AGAIN_LATER
    assert not handler.present.is_set()


async def test_a_router_that_pauses_within_the_bounds_gets_every_frame() -> None:
    peer, handler = Peer(), Handler()
    connection = RouterConnection(1, peer.websocket(), handler)
    async with asyncio.timeout(TIMEOUT_S):
        served = await serve_until_paused(connection, peer, handler)
        for number in range(MAX_BUFFERED_FRAMES):
            connection.send(step(number))
        peer.reads.set()
        await connection.flush(TIMEOUT_S)
    served.cancel()
    await asyncio.gather(served, return_exceptions=True)
    frames = [protocol.decode_worker_frame(data) for data in peer.got[1:]]
    assert frames == [step(number) for number in range(MAX_BUFFERED_FRAMES)]
    assert peer.close_code is None
