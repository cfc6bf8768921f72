"""Frames on a stream socket: a 4-byte little-endian length, then the frame. Sizes are bounded."""

import socket

MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4


class FrameError(Exception):
    """The peer broke the framing, or a frame is too large to send."""


def send_frame(sock: socket.socket, frame: bytes) -> None:
    """Send a frame, and block until it is written. Raises FrameError, OSError."""
    sock.sendall(framed(frame))


def framed(frame: bytes) -> bytes:
    """Return a frame as it goes over the socket. Raises FrameError."""
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} can be sent")
    return len(frame).to_bytes(_LENGTH_BYTES, "little") + frame


def receive_frame(sock: socket.socket) -> bytes | None:
    """Wait for the next frame; None when the peer has closed. Raises FrameError, OSError."""
    head = _receive_exactly(sock, _LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"the peer announced a frame of {length} bytes, over {MAX_FRAME_BYTES}")
    frame = _receive_exactly(sock, length)
    if frame is None:
        raise FrameError("the peer closed inside a frame")
    return frame


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    """Read exactly `count` bytes; None if the peer closed before the first of them."""
    buffer = bytearray(count)
    view, filled = memoryview(buffer), 0
    while filled < count:
        received = sock.recv_into(view[filled:])
        if received == 0:
            if filled == 0:
                return None
            raise FrameError("the peer closed inside a frame")
        filled += received
    return bytes(buffer)
