"""Measures how many sent bytes a peer has not received yet."""

import asyncio
import fcntl
import struct
import termios


def unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """In this process's buffers and in the kernel's (unacknowledged; tcp(7), SIOCOUTQ)."""
    socket = None if transport.is_closing() else transport.get_extra_info("socket")
    if socket is None:
        return 0
    (kernel,) = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
    return transport.get_write_buffer_size() + int(kernel)
