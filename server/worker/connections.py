"""One WebSocket to one router: the hellos, frames in, a bounded buffer of frames out.

It knows the protocol's shape; what frames mean is the worker's business.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from loraplex.server.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    RouterFrame,
    RouterHello,
    StepEvents,
    TokenEvent,
    WorkerFrame,
    WorkerHello,
    WorkerStatus,
    decode_router_frame,
    encode,
)
from loraplex.server.worker.outbox import Outbox
from loraplex.server.worker.sequences import split_events

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
MAX_BUFFERED_FRAMES = 4096
MAX_BUFFERED_BYTES = 32 << 20
MAX_ROUTER_ID = 256
# WebSocket close codes (RFC 6455 section 7.4).
PROTOCOL_ERROR = 1002
POLICY_VIOLATION = 1008
TRY_AGAIN_LATER = 1013
_MAX_REASON_BYTES = 120


class ConnectionFault(Exception):
    """This connection must end; its neighbours go on. str() is sent to the router."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class FrameHandler(Protocol):
    """Handle the frames of connections. Methods are called on the event loop and must not block."""

    def hello(self) -> WorkerHello: ...

    def connected(self, connection: "RouterConnection") -> None: ...

    def router_frame(self, connection: "RouterConnection", frame: RouterFrame) -> None:
        """Handle a frame of a router. Raises ConnectionFault."""
        ...

    def disconnected(self, connection: "RouterConnection") -> None: ...


class RouterConnection:
    """An accepted WebSocket. `send*` never wait: a router that lags too far behind is cut off."""

    def __init__(self, number: int, websocket: WebSocket, handler: FrameHandler) -> None:
        self.number = number
        self.router_id = "?"
        self._websocket = websocket
        self._handler = handler
        self._outbox = Outbox(MAX_BUFFERED_FRAMES, MAX_BUFFERED_BYTES)
        self._filled = asyncio.Event()
        self._overrun = asyncio.Event()
        self._flushed = asyncio.Event()

    def send(self, frame: WorkerFrame) -> None:
        self._push(encode(frame))

    def send_status(self, status: WorkerStatus) -> None:
        self._outbox.push_status(encode(status))
        self._filled.set()

    def send_events(self, step: int, events: Sequence[TokenEvent]) -> None:
        """Send events in one frame for all of a step, unless they do not fit into one."""
        frame = encode(StepEvents(step, tuple(events)))
        if len(frame) > MAX_FRAME_BYTES and len(events) > 1:
            for half in split_events(events):
                self.send_events(step, half)
        else:
            self._push(frame)

    def _push(self, frame: bytes) -> None:
        if self._outbox.push(frame):
            self._flushed.clear()
            self._filled.set()
        else:
            self._overrun.set()

    async def flush(self, limit_s: float) -> None:
        """Wait until all is sent, or limit_s is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._flushed.wait(), limit_s)

    async def serve(self) -> None:
        """Serve the connection from the hello to its end."""
        try:
            await self._greet()
            self._handler.connected(self)
            log.info("router %s connected", self.router_id)
            try:
                await self._exchange()
            finally:
                self._handler.disconnected(self)
        except ConnectionFault as fault:
            log.warning("router %s: connection closed: %s", self.router_id, fault)
            await self._close(fault)
        except WebSocketDisconnect:
            log.info("router %s disconnected", self.router_id)

    async def _greet(self) -> None:
        try:
            frame = await asyncio.wait_for(self._receive(), HELLO_TIMEOUT_S)
        except TimeoutError as error:
            raise ConnectionFault(POLICY_VIOLATION, "no hello in time") from error
        if not isinstance(frame, RouterHello):
            raise ConnectionFault(PROTOCOL_ERROR, "expected a hello first")
        if frame.version != PROTOCOL_VERSION:
            raise ConnectionFault(
                PROTOCOL_ERROR,
                f"protocol version {PROTOCOL_VERSION} is spoken here, the router's is "
                f"{frame.version}: run the same release on both",
            )
        self.router_id = printable(frame.router_id)
        await self._send_now(encode(self._handler.hello()))

    async def _exchange(self) -> None:
        tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._write()),
            asyncio.create_task(self._await_overrun()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self) -> None:
        while True:
            frame = await self._receive()
            if isinstance(frame, RouterHello):
                raise ConnectionFault(PROTOCOL_ERROR, "a second hello")
            self._handler.router_frame(self, frame)

    async def _receive(self) -> RouterFrame:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        data = message.get("bytes")
        if data is None:
            raise ConnectionFault(PROTOCOL_ERROR, "a text frame")
        try:
            frame: RouterFrame = decode_router_frame(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # The parser's own words name fields and types, never values.
            raise ConnectionFault(PROTOCOL_ERROR, f"a malformed frame: {error}") from error
        return frame

    async def _write(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while (frame := self._outbox.pop()) is not None:
                await self._send_now(frame)
            self._flushed.set()

    async def _send_now(self, frame: bytes) -> None:
        try:
            await self._websocket.send_bytes(frame)
        except RuntimeError as error:
            raise WebSocketDisconnect(1006) from error

    async def _await_overrun(self) -> None:
        await self._overrun.wait()
        raise ConnectionFault(
            TRY_AGAIN_LATER,
            f"the router reads too slowly: {len(self._outbox)} frames, {self._outbox.nbytes} bytes",
        )

    async def _close(self, fault: ConnectionFault) -> None:
        """A router that does not read does not get the reason either; TCP's own limit ends it."""
        reason = str(fault).encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        with contextlib.suppress(TimeoutError, RuntimeError, WebSocketDisconnect):
            await asyncio.wait_for(self._websocket.close(fault.code, reason), 1.0)


def printable(text: str) -> str:
    """A peer's name as it may stand in a log line."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_ROUTER_ID])


def require(problem: str | None) -> None:
    """A frame with a problem costs its connection. Raises ConnectionFault."""
    if problem is not None:
        raise ConnectionFault(POLICY_VIOLATION, problem)
