"""The worker's end of a real socket pair, for tests of the loop and of the engine process."""

import socket
from collections.abc import Callable
from typing import TypeVar

from loraplex.server.engine.framing import receive_frame, send_frame
from loraplex.server.engine.messages import (
    FromEngine,
    NeedSlab,
    SlabReleased,
    SlabStaged,
    StepOutput,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from loraplex.server.protocol import GenerateRequest, TokenEvent
from tests.server.engine.harness import layout

M = TypeVar("M")
TIMEOUT_S = 240.0


def staged(digest: str) -> ToEngine:
    return SlabStaged(layout(digest), (0, 1))


class FakeWorker:
    """Answers every NeedSlab with `answer_slab` (by default it is staged), and sorts what comes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        self.sock = sock
        self.answer_slab: Callable[[str], ToEngine | None] = staged
        self.events: dict[int, list[TokenEvent]] = {}
        self.outputs: list[StepOutput] = []
        self.released: list[str] = []

    def send(self, message: ToEngine) -> None:
        send_frame(self.sock, encode(message))

    def submit(self, key: int, request: GenerateRequest) -> None:
        self.send(Submit(key, request))

    def receive(self) -> FromEngine | None:
        """The next message; None when the engine has closed. Slabs are staged on the way."""
        frame = receive_frame(self.sock)
        if frame is None:
            return None
        message: FromEngine = decode_from_engine(frame)
        match message:
            case NeedSlab(digest):
                if (answer := self.answer_slab(digest)) is not None:
                    self.send(answer)
            case SlabReleased(digest):
                self.released.append(digest)
            case StepOutput():
                self.outputs.append(message)
                for item in message.events:
                    self.events.setdefault(item.key, []).append(item.event)
        return message

    def expect(self, kind: type[M]) -> M:
        message = self.receive()
        while not isinstance(message, kind):
            assert message is not None, f"the engine has closed; expected {kind.__name__}"
            message = self.receive()
        return message

    def is_over(self, key: int) -> bool:
        return bool(self.events.get(key)) and self.events[key][-1].finish is not None

    def answer(self, key: int) -> list[int]:
        """Wait for the terminal event; all tokens."""
        while not self.is_over(key):
            assert self.receive() is not None, "the engine has closed"
        return [token for event in self.events[key] for token in event.token_ids]
