"""An engine whose model several processes share: the leader's executor, the pipe to the followers,
and the followers, which do what the leader does."""

import logging
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, assert_never

import msgspec
import numpy as np

from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopyOver,
    CopySums,
    CopyUsable,
    Executor,
    Masks,
    PageCopies,
    PagesCopied,
    PictureCopy,
    PictureIn,
    T,
    TowerTicket,
)
from loraplex.server.engine.framing import FrameError, receive_frame, send_frame
from loraplex.server.engine.plan import SliceResult, StepPlan


class Constrain(msgspec.Struct, frozen=True, array_like=True, tag="co"):
    """Draw for the constrained slices of the newest step. bits: of `Masks`, row by row."""

    slices: list[int]
    bits: bytes

    @classmethod
    def of(cls, masks: Masks) -> "Constrain":
        return cls(masks.slices, masks.bits.tobytes())

    @property
    def words(self) -> int:
        """Words of each mask."""
        return len(self.bits) // (4 * len(self.slices))

    def masks(self, memory: np.ndarray) -> Masks:
        """Write the bits to memory, and return the masks. memory: of `Executor.mask_memory` for so
        many slices and words.
        """
        memory[:] = np.frombuffer(self.bits, memory.dtype).reshape(memory.shape)
        return Masks(self.slices, memory)


class UseCopy(msgspec.Struct, frozen=True, array_like=True, tag="uc"):
    """The next step may use the oldest copy that none may use yet."""


class Encode(msgspec.Struct, frozen=True, array_like=True, tag="en"):
    """Launch further work of the tower, of so many pictures where none are under way."""

    pictures: int


class GroupMember(Executor[T], Protocol[T]):
    """An executor whose copies can be used when another process says so."""

    def use_copy(self) -> None:
        """Let the next step use the oldest copy that none may use yet."""
        ...

    def copies_over(self) -> list[CopyOver | PagesCopied]:
        """Return the copies that have ended, as `poll_copies` does, and let no step use a copy."""
        ...

    def sums_offered(self) -> list[CopySums]:
        """This device's numbers of copies, for the others; each once. Such a copy goes on with
        `add_sums`."""
        ...

    def add_sums(self, sums: CopySums) -> None:
        """The sums over all devices. After the last ones of a copy it can be used as others can.
        Raises ValueError for what no copy waits for."""
        ...


# A plan is of a step to begin after those before it, sums are of the oldest copy that waits for
# them, and copies are to begin.
Command = (
    StepPlan | Constrain | AdapterCopy | CopySums | UseCopy | PictureCopy | Encode | PageCopies
)
# What the others tell the leader.
Answer = CopyOver | CopySums | PictureIn | PagesCopied

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


log = logging.getLogger(__name__)


class GroupLost(Exception):
    """A process of the group is gone, or does not do what the others do."""


class GroupExecutor(Generic[T]):
    """Implements `Executor` by one of this process. Each call is sent to the others first, so that
    they compute at the same time. Only the results of this process are read.

    A failed step leaves the others waiting for this process: the group is lost then, and with it
    the engine.
    """

    def __init__(self, executor: GroupMember[T], links: Sequence[socket.socket]) -> None:
        """Start a thread that reads each link: stream sockets to the other processes."""
        self._executor, self._links = executor, links
        self.limits, self.summary = executor.limits, executor.summary
        self.memory, self.stored_pages = executor.memory, executor.stored_pages
        self.stored_snapshots = executor.stored_snapshots
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        # Copies that are over in some processes, by digest: the error of each. A slot may have
        # another adapter by then; an adapter is not copied again before its copy is over.
        self._over: defaultdict[str, list[str | None]] = defaultdict(list)
        # Copies of pages that are over in some processes: what failed in each.
        self._copied: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._ended: list[CopyNews] = []  # over in all processes, and not reported yet
        # Of copies that wait for them, by digest: the numbers of each process that has offered its.
        self._sums: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        # Of pictures that are not in every process, in the order of their start: the errors.
        self._pictures: deque[tuple[int, list[str | None]]] = deque()
        self._gone = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(link,), name=f"shard-{i}", daemon=True)
            for i, link in enumerate(links, 1)
        ]
        for reader in self._readers:
            reader.start()

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> T:
        self._tell(plan)
        return self._executor.launch(plan, meanwhile)

    def mask_memory(self, count: int, words: int) -> np.ndarray:
        return self._executor.mask_memory(count, words)

    def constrain(self, ticket: T, masks: Masks) -> None:
        self._tell(Constrain.of(masks))
        self._executor.constrain(ticket, masks)

    def collect(self, ticket: T) -> list[SliceResult]:
        return self._executor.collect(ticket)

    def wait_idle(self) -> None:
        raise GroupLost("the other processes of the group wait for this one")

    def start_copy(self, copy: AdapterCopy) -> None:
        self._tell(copy)
        self._executor.start_copy(copy)

    def copy_pages(self, copies: PageCopies) -> None:
        self._tell(copies)
        self._executor.copy_pages(copies)

    def poll_copies(self) -> list[CopyNews]:
        """A copy is over once it is in every process."""
        found: list[CopyNews] = []
        for news in self._executor.poll_copies():
            if isinstance(news, CopyUsable):
                self._tell(UseCopy())
                found.append(news)
            else:
                found += self._note(news)
        for sums in self._executor.sums_offered():
            self._add(sums)
        self._read_answers()
        found, self._ended = found + self._ended, []
        if self._gone.is_set():
            raise GroupLost("a process of the group is gone")
        return found

    def start_picture(self, copy: PictureCopy) -> None:
        self._tell(copy)
        self._pictures.append((copy.blocks[0], []))
        self._executor.start_picture(copy)

    def poll_pictures(self) -> list[PictureIn]:
        """A picture is in once every process has its patches, or none."""
        for news in self._executor.poll_pictures():
            self._note_picture(news)
        self._read_answers()
        found = []
        while self._pictures and len(self._pictures[0][1]) > len(self._links):
            block, errors = self._pictures.popleft()
            failed = [error for error in errors if error is not None]
            if failed and len(failed) < len(errors):
                raise GroupLost(f"a process of the group lacks a picture: {failed[0]}")
            found.append(PictureIn(block, failed[0] if failed else None))
        return found

    def encode(self, pictures: int) -> TowerTicket:
        self._tell(Encode(pictures))
        return self._executor.encode(pictures)

    def close(self) -> None:
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._executor.close()

    def _read_answers(self) -> None:
        """Note the other processes' answers."""
        with suppress(Empty):
            while True:
                answer = self._answers.get_nowait()
                if isinstance(answer, CopySums):
                    self._add(answer)
                elif isinstance(answer, PictureIn):
                    self._note_picture(answer)
                else:
                    self._ended += self._note(answer)

    def _note_picture(self, news: PictureIn) -> None:
        """Note what has become of a picture in one process."""
        of = (errors for block, errors in self._pictures if block == news.block)
        next(of).append(news.error)

    def _note(self, news: CopyOver | PagesCopied) -> Sequence[CopyNews]:
        """Note that a copy has ended in one process; with the last one, return the end of all.
        Raises GroupLost where some have the adapter and others do not.
        """
        if isinstance(news, PagesCopied):
            return self._note_pages(news)
        errors = self._over[news.digest]
        errors.append(news.error)
        self._check_sums(news.digest)
        if len(errors) <= len(self._links):
            return []
        del self._over[news.digest]
        failed = [error for error in errors if error is not None]
        if failed and len(failed) < len(errors):
            raise GroupLost(f"a process of the group lacks an adapter: {failed[0]}")
        return [news]

    def _note_pages(self, news: PagesCopied) -> list[PagesCopied]:
        """A page that failed in one process failed in all."""
        ends = self._copied[news.number]
        ends.append(news.failed)
        if len(ends) <= len(self._links):
            return []
        del self._copied[news.number]
        return [PagesCopied(news.number, tuple(sorted(set().union(*ends))))]

    def _add(self, sums: CopySums) -> None:
        """Note one process's numbers; with the last one's, add them up once for all, and let all go
        on. Raises GroupLost.
        """
        offered = self._sums[sums.digest]
        offered.append(np.frombuffer(sums.numbers, np.float32))
        self._check_sums(sums.digest)
        if len(offered) <= len(self._links):
            return
        del self._sums[sums.digest]
        added = CopySums(sums.digest, np.sum(offered, axis=0, dtype=np.float32).tobytes())
        self._tell(added)
        self._executor.add_sums(added)

    def _check_sums(self, digest: str) -> None:
        """Check that all processes agree on an adapter's numbers. Raises GroupLost where a process
        waits for one that has failed, or offers other numbers than the others.
        """
        offered = self._sums.get(digest, [])
        failed = [error for error in self._over.get(digest, []) if error is not None]
        if offered and failed:
            raise GroupLost(f"a process of the group lacks an adapter: {failed[0]}")
        if len({len(numbers) for numbers in offered}) > 1:
            raise GroupLost("processes of the group hold different adapters")

    def _tell(self, command: Command) -> None:
        """Send a command to all other processes. Raises GroupLost."""
        frame = encode(command)
        try:
            for link in self._links:
                send_frame(link, frame)
        except (OSError, FrameError) as error:
            raise GroupLost(f"a process of the group cannot be told: {error}") from error

    def _read(self, link: socket.socket) -> None:
        try:
            while (frame := receive_frame(link)) is not None:
                self._answers.put(decode_answer(frame))
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            log.debug("reading from a process of the group: %s", error)
        self._gone.set()


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
