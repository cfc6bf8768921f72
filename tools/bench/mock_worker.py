"""A worker without an engine, to measure routers by: the real protocol, tokens from a counter.

All running sequences get a token in each step, and all events of a step leave in one frame.
"""

import asyncio
import hashlib
import sys
from contextlib import suppress
from http import HTTPStatus

import msgspec
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from loraplex.launcher.demo import model_path
from loraplex.server.model.card import model_card
from loraplex.server.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    GenerateRequest,
    ModelCard,
    StepEvents,
    TokenEvent,
    WorkerHello,
    WorkerStatus,
    decode_router_frame,
    encode,
)

CREDITS = 4096
_STATUS_S = 0.5

# Sequences with the index of their next token.
Running = dict[tuple[str, int, int], tuple[GenerateRequest, int]]


def demo_card() -> ModelCard:
    """Makes the demo model's card, with a real tokenizer."""
    return model_card(
        model_path(), names=("base",), dtype="float32", device="cpu", max_lora_rank=64
    )


class MockWorker:
    """step_s: between two steps; 0 = as soon as a request is there."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        card = demo_card()
        self._card = msgspec.json.encode(card)
        self._base_digest = card.base_digest
        # Ordinary tokens: the first ids of a vocabulary are often special.
        self._ids = range(300, min(2000, card.vocab_size))

    async def serve(self) -> None:
        """Serves until cancelled. The port is the one line that it prints."""
        async with serve(
            self._connection,
            "127.0.0.1",
            0,
            process_request=self._http,
            compression=None,
            max_size=MAX_FRAME_BYTES,
        ) as server:
            print(next(iter(server.sockets)).getsockname()[1], flush=True)
            await server.serve_forever()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/connect":
            return None
        if request.path == "/card":
            return Response(200, "OK", Headers(), self._card)
        return connection.respond(HTTPStatus.NOT_FOUND, "")

    async def _connection(self, connection: ServerConnection) -> None:
        running: Running = {}
        there_is_work = asyncio.Event()
        await connection.recv(decode=False)
        digest = hashlib.sha256(self._card).hexdigest()
        await connection.send(encode(WorkerHello("mock", 1, digest, CREDITS)))
        helpers = [
            asyncio.create_task(self._steps(connection, running, there_is_work)),
            asyncio.create_task(self._report(connection, running)),
        ]
        with suppress(ConnectionClosed):
            async for message in connection:
                assert isinstance(message, bytes)
                frame = decode_router_frame(message)
                if isinstance(frame, GenerateRequest):
                    key = (frame.request_id, frame.attempt, frame.choice)
                    running[key] = (frame, len(frame.accepted_ids))
                    there_is_work.set()
                elif isinstance(frame, Abort):
                    await self._abort(connection, frame, running)
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)

    async def _steps(
        self,
        connection: ServerConnection,
        running: Running,
        there_is_work: asyncio.Event,
    ) -> None:
        step = 0
        while True:
            await there_is_work.wait()
            await asyncio.sleep(self._step_s)
            step += 1
            events: list[TokenEvent] = []
            for key, (request, index) in list(running.items()):
                is_last = index + 1 >= request.sampling.max_tokens
                token = self._ids[(step + len(events)) % len(self._ids)]
                events.append(
                    TokenEvent(*key, index, (token,), finish="length" if is_last else None)
                )
                if is_last:
                    del running[key]
                else:
                    running[key] = (request, index + 1)
            if not running:
                there_is_work.clear()
            if events:
                await connection.send(encode(StepEvents(step, tuple(events))))

    async def _abort(
        self,
        connection: ServerConnection,
        frame: Abort,
        running: Running,
    ) -> None:
        for key in list(running):
            if key[:2] == (frame.request_id, frame.attempt) and frame.choice in (None, key[2]):
                index = running.pop(key)[1]
                event = TokenEvent(*key, index, (), finish="abort")
                await connection.send(encode(StepEvents(0, (event,))))

    async def _report(
        self,
        connection: ServerConnection,
        running: Running,
    ) -> None:
        while True:
            status = WorkerStatus(
                worker_id="mock",
                epoch=1,
                base_digest=self._base_digest,
                ready=True,
                draining=False,
                free_pages=1000,
                total_pages=1000,
                running=len(running),
                waiting=0,
                resident=(),
                loading=(),
                step=0,
            )
            await connection.send(encode(status))
            await asyncio.sleep(_STATUS_S)


if __name__ == "__main__":
    asyncio.run(MockWorker(float(sys.argv[1])).serve())
