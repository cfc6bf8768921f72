"""Framing and the channel: bounds, closed peers, a worker that stops reading."""

import queue
import socket
import threading
from types import SimpleNamespace

import pytest

from loraplex.server.engine import channel as channel_module
from loraplex.server.engine.channel import WorkerChannel, WorkerGone
from loraplex.server.engine.framing import MAX_FRAME_BYTES, FrameError, receive_frame, send_frame
from loraplex.server.engine.messages import (
    AbortSequence,
    Alive,
    EngineStats,
    NeedSlab,
    SequenceEvent,
    StepOutput,
    decode_from_engine,
    encode,
)
from loraplex.server.protocol import TokenEvent

TIMEOUT_S = 240.0
STATS = EngineStats()


@pytest.mark.parametrize("frame", [b"", b"x", b"y" * 300_000])
def test_frames_arrive_whole(frame: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send_frame, args=(ours, frame))
        sender.start()
        assert receive_frame(theirs) == frame
        sender.join(TIMEOUT_S)
        ours.close()
        assert receive_frame(theirs) is None


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        (b"\x05\x00", "inside a frame"),
        (b"\x05\x00\x00\x00", "inside a frame"),
        (b"\x05\x00\x00\x00ab", "inside a frame"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "announced"),
    ],
)
def test_broken_frames_are_errors(sent: bytes, word: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.close()
        with pytest.raises(FrameError, match=word):
            receive_frame(theirs)


def test_a_frame_too_large_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(FrameError, match="at most"):
        send_frame(ours, bytes(MAX_FRAME_BYTES + 1))


def test_messages_both_ways_and_waiting() -> None:
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    channel = WorkerChannel(theirs, gone.set)
    with ours:
        assert channel.receive(0) is None
        assert channel.receive(0.001) is None
        send_frame(ours, encode(AbortSequence(7)))
        assert channel.receive(TIMEOUT_S) == AbortSequence(7)
        channel.send(NeedSlab("a"))
        channel.close(flush_s=TIMEOUT_S)
        frame = receive_frame(ours)
        assert frame is not None
        assert decode_from_engine(frame) == NeedSlab("a")
        assert receive_frame(ours) is None
    assert gone.wait(TIMEOUT_S)
    with pytest.raises(WorkerGone):
        channel.send(NeedSlab("b"))


def test_what_the_pipe_takes_in_parts_arrives_whole_and_in_order() -> None:
    """The loop and the writer's thread share the pipe."""
    ours, theirs = socket.socketpair()
    channel = WorkerChannel(theirs)
    texts = [f"{number} " + "x" * (number % 7 * 40_000) for number in range(60)]
    ended = threading.Event()

    def produce() -> None:
        for text in texts:
            channel.send(NeedSlab(text))
        channel.close(flush_s=TIMEOUT_S)
        ended.set()

    threading.Thread(target=produce).start()
    received = []
    with ours:
        while (frame := receive_frame(ours)) is not None:
            message = decode_from_engine(frame)
            if not isinstance(message, Alive):
                received.append(message)
    assert received == [NeedSlab(text) for text in texts]
    assert ended.wait(TIMEOUT_S)


def test_a_sign_of_life_never_lies_within_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's wait may end just when the loop leaves the rest of a frame to the writer."""

    class Late(queue.Queue[object]):
        came, is_over = threading.Event(), False

        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            self.came.set()

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            if not self.is_over:
                assert self.came.wait(TIMEOUT_S)
                self.is_over = True
                raise queue.Empty
            return super().get(block, timeout)

    late = SimpleNamespace(Queue=Late, Empty=queue.Empty, Full=queue.Full)
    monkeypatch.setattr(channel_module, "queue", late)
    ours, theirs = socket.socketpair()
    channel = WorkerChannel(theirs)
    message = NeedSlab("x" * 1_000_000)
    with ours:
        channel.send(message)
        frame = receive_frame(ours)
        assert frame is not None
        assert decode_from_engine(frame) == message
        channel.close(flush_s=TIMEOUT_S)


def test_a_worker_that_stops_reading_bounds_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_OUTBOX_FRAMES", 4)
    monkeypatch.setattr(channel_module, "_FULL_WARNING_S", 0.01)
    full = threading.Event()
    monkeypatch.setattr(channel_module.log, "warning", lambda *args: full.set())
    ours, theirs = socket.socketpair()
    channel = WorkerChannel(theirs)
    text = "x" * 100_000
    sent = []
    ended = threading.Event()

    def produce() -> None:
        try:
            while True:
                channel.send(NeedSlab(text))
                sent.append(1)
        except WorkerGone:
            ended.set()

    producer = threading.Thread(target=produce)
    producer.start()
    assert full.wait(TIMEOUT_S)
    assert len(sent) < 50
    assert not ended.is_set()
    ours.close()
    assert ended.wait(TIMEOUT_S), "with the worker gone the engine leaves"
    producer.join(TIMEOUT_S)
    channel.close(flush_s=0.1)


def test_a_stuck_worker_does_not_hold_up_the_end() -> None:
    ours, theirs = socket.socketpair()
    channel = WorkerChannel(theirs)
    for _ in range(5):
        channel.send(NeedSlab("x" * 1_000_000))
    channel.close(flush_s=0.05)
    with ours, pytest.raises(WorkerGone):
        channel.send(NeedSlab("a"))


def test_a_step_too_large_for_one_frame_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 600)
    events = tuple(
        SequenceEvent(i, TokenEvent("r" * 100, 1, 0, 0, (5,), message="m" * 50)) for i in range(9)
    )
    ours, theirs = socket.socketpair()
    channel = WorkerChannel(theirs)
    channel.send(StepOutput(3, events, STATS, 0.5, 9))
    channel.send(
        StepOutput(4, (SequenceEvent(1, TokenEvent("r" * 900, 1, 0, 0, ())),), STATS, 0, 1)
    )
    channel.close(flush_s=TIMEOUT_S)
    received = []
    with ours:
        while (frame := receive_frame(ours)) is not None:
            message = decode_from_engine(frame)
            assert isinstance(message, StepOutput)
            received.append(message)
    assert [out.step for out in received[:-1]] == [3] * (len(received) - 1)
    assert [item.key for out in received[:-1] for item in out.events] == list(range(9))
    assert received[-1].step == 4
