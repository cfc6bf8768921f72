"""A process that shares an engine's model: it carries out what the first process does."""

import socket
import threading
from queue import Empty, SimpleQueue
from typing import Any, assert_never

import msgspec

from loraplex.server.engine.executor import AdapterCopy, CopySums, PageCopies, PictureCopy
from loraplex.server.engine.framing import FrameError, receive_frame, send_frame
from loraplex.server.engine.group.commands import (
    Command,
    Constrain,
    Encode,
    GroupMember,
    UseCopy,
    decode_command,
    encode,
)
from loraplex.server.engine.plan import StepPlan

# While copies are under way the end of one is looked for this often.
_POLL_S = 0.001


class Follower:
    """Run the leader's commands in a process of a group. link: stream socket to the leader."""

    def __init__(self, executor: GroupMember[Any], link: socket.socket) -> None:
        self._executor, self._link = executor, link
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._newest: Any = None  # its ticket
        self._copying = 0

    def run(self) -> None:
        """Execute commands until the leader has closed the link. A step whose leader is gone never
        ends: who has started the processes kills them all. Raises whatever a step raises.
        """

        def read() -> None:
            try:
                while (frame := receive_frame(self._link)) is not None:
                    self._commands.put(decode_command(frame))
            except (OSError, FrameError, msgspec.MsgspecError):
                pass  # the leader's end, one way or another
            self._commands.put(None)

        threading.Thread(target=read, name="leader-reader", daemon=True).start()
        while True:
            try:
                command = self._commands.get(timeout=_POLL_S if self._copying else None)
            except Empty:
                self._tell_of_copies()
                continue
            if command is None:
                return
            self._carry_out(command)
            self._tell_of_copies()

    def _carry_out(self, command: Command) -> None:
        match command:
            case StepPlan():
                self._newest = self._executor.launch(command)
            case Constrain(slices):
                masks = command.masks(self._executor.mask_memory(len(slices), command.words))
                self._executor.constrain(self._newest, masks)
            case AdapterCopy():
                self._copying += 1
                self._executor.start_copy(command)
            case CopySums():
                self._executor.add_sums(command)
            case UseCopy():
                self._executor.use_copy()
            case PictureCopy():
                self._copying += 1
                self._executor.start_picture(command)
            case Encode(pictures):
                self._executor.encode(pictures)
            case PageCopies():
                self._copying += 1
                self._executor.copy_pages(command)
            case _:
                assert_never(command)

    def _tell_of_copies(self) -> None:
        if not self._copying:
            return
        for over in self._executor.copies_over():
            self._copying -= 1
            send_frame(self._link, encode(over))
        for sums in self._executor.sums_offered():
            send_frame(self._link, encode(sums))
        for picture in self._executor.poll_pictures():
            self._copying -= 1
            send_frame(self._link, encode(picture))
