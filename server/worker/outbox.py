"""Frames that wait to be sent to one router: bounded in number and bytes. Pure."""

from collections import deque


class Outbox:
    """Encoded frames in order; the status is a hint, so only the newest one is kept."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self.max_frames = max_frames
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._frames: deque[bytes] = deque()
        self._status: bytes | None = None

    def __len__(self) -> int:
        return len(self._frames)

    def push(self, frame: bytes) -> bool:
        """False when there is no room: the reader is too slow, and the frame is not taken.

        A frame of any size is taken when nothing waits.
        """
        full = len(self._frames) >= self.max_frames or self.nbytes + len(frame) > self.max_bytes
        if self._frames and full:
            return False
        self._frames.append(frame)
        self.nbytes += len(frame)
        return True

    def push_status(self, frame: bytes) -> None:
        self._status = frame

    def pop(self) -> bytes | None:
        """The next frame to send; a waiting status goes first, so that load never hides it."""
        if self._status is not None:
            status, self._status = self._status, None
            return status
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self.nbytes -= len(frame)
        return frame
