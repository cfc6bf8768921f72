"""The engine's end of the pipe to the worker. The step loop writes itself as long as the pipe takes
what it writes. Two threads read and write the rest, so that the loop does not wait."""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from loraplex.server.engine.framing import (
    MAX_FRAME_BYTES,
    FrameError,
    framed,
    receive_frame,
    send_frame,
)
from loraplex.server.engine.messages import (
    Alive,
    FromEngine,
    StepOutput,
    ToEngine,
    decode_to_engine,
    encode,
)

log = logging.getLogger(__name__)

MAX_INBOX_FRAMES = 4096
MAX_OUTBOX_FRAMES = 4096
ALIVE_INTERVAL_S = 0.25
_FULL_WARNING_S = 5.0


class WorkerGone(Exception):
    """The worker has closed the pipe, or broke the protocol."""


class Channel(Protocol):
    """Source of requests and sink of events: the pipe to the worker, or a program's own queues."""

    def receive(self, wait_s: float | None) -> ToEngine | None:
        """The next message, or None if none comes within `wait_s` (None = for ever)."""
        ...

    def send(self, message: FromEngine) -> None: ...


class WorkerChannel:
    """Bounded in both directions. When the inbox is full, the worker's writes wait.

    In the outbox bytes are the rest of a frame that the pipe took a part of.

    on_gone: called once on the reader's thread when the worker is gone.
    """

    def __init__(self, sock: socket.socket, on_gone: Callable[[], None] = lambda: None) -> None:
        self._sock = sock
        self._on_gone = on_gone
        self._inbox: queue.Queue[ToEngine | None] = queue.Queue(MAX_INBOX_FRAMES)
        self._outbox: queue.Queue[FromEngine | bytes | None] = queue.Queue(MAX_OUTBOX_FRAMES)
        self._writing = threading.Lock()
        self._gone = threading.Event()
        self._reader = threading.Thread(target=self._read, name="worker-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="worker-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def receive(self, wait_s: float | None) -> ToEngine | None:
        """The next message, or None if none comes within `wait_s` (None = for ever).

        Raises WorkerGone.
        """
        try:
            message = self._inbox.get(block=wait_s != 0, timeout=wait_s or None)
        except queue.Empty:
            return None
        if message is None:
            raise WorkerGone
        return message

    def send(self, message: FromEngine) -> None:
        """Write a message, or queue it behind those that wait. The queue is bounded: this waits
        while the worker does not read.

        Raises WorkerGone.
        """
        if self._write_now(message):
            return
        while not self._gone.is_set():
            try:
                return self._outbox.put(message, timeout=_FULL_WARNING_S)
            except queue.Full:
                log.warning("the worker reads nothing: %d frames wait", MAX_OUTBOX_FRAMES)
        raise WorkerGone

    def _write_now(self, message: FromEngine) -> bool:
        """Write a message if nothing waits before it, without a wait. False: it is to be queued."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            if self._outbox.unfinished_tasks:
                return False
            whole = framed(encode(message))
            count = self._sock.send(whole, socket.MSG_DONTWAIT)
            if count < len(whole):
                self._outbox.put_nowait(whole[count:])
        except (FrameError, OSError):  # too large, the pipe is full, or the worker is gone
            return False
        finally:
            self._writing.release()
        return True

    def close(self, flush_s: float) -> None:
        """Write the queued messages for at most `flush_s`, and close."""
        try:
            self._outbox.put(None, timeout=0 if self._gone.is_set() else flush_s)
            self._writer.join(flush_s)
        except queue.Full:
            log.warning("the worker reads nothing: what is queued is lost")
        self._hang_up()
        self._sock.close()

    def _hang_up(self) -> None:
        self._gone.set()
        with contextlib.suppress(OSError):  # it may be closed at the other end already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while not self._gone.is_set() and (frame := receive_frame(self._sock)) is not None:
                self._inbox.put(decode_to_engine(frame))
        except (FrameError, msgspec.MsgspecError) as error:
            log.error("the worker broke the protocol: %s", error)
        except OSError as error:
            log.debug("reading from the worker: %s", error)
        self._gone.set()
        with contextlib.suppress(queue.Full):  # then nobody waits for a message
            self._inbox.put_nowait(None)
        self._on_gone()

    def _write(self) -> None:
        try:
            while True:
                try:
                    message = self._outbox.get(timeout=ALIVE_INTERVAL_S)
                except queue.Empty:
                    self._write_now(Alive())  # not within a frame whose rest waits
                    continue
                if message is None:
                    return
                self._write_all(message)
                self._outbox.task_done()
        except (FrameError, OSError) as error:
            log.error("writing to the worker: %s", error)
            self._hang_up()

    def _write_all(self, message: FromEngine | bytes) -> None:
        with self._writing:
            if isinstance(message, bytes):
                self._sock.sendall(message)
                return
            for frame in _encode_bounded(message):
                send_frame(self._sock, frame)


def _encode_bounded(message: FromEngine) -> list[bytes]:
    """Encode events in one frame, or in several if a step's events are too large for one."""
    frame = encode(message)
    if len(frame) <= MAX_FRAME_BYTES or not isinstance(message, StepOutput):
        return [frame]
    half = len(message.events) // 2
    if half == 0:
        return [frame]
    first, second = message.events[:half], message.events[half:]
    return [
        part
        for events in (first, second)
        for part in _encode_bounded(msgspec.structs.replace(message, events=events))
    ]
