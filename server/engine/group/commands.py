"""The pipe between the processes of one engine: what the leader has the others do, too. Pure."""

import msgspec
import numpy as np

from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyOver,
    CopySums,
    Masks,
    PageCopies,
    PagesCopied,
    PictureCopy,
    PictureIn,
)
from loraplex.server.engine.plan import StepPlan


class Launch(msgspec.Struct, frozen=True, array_like=True, tag="la"):
    """Begin a step, after those before it."""

    plan: StepPlan


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


class StartCopy(msgspec.Struct, frozen=True, array_like=True, tag="sc"):
    """Begin a copy of an adapter. Answered by CopyOver."""

    copy: AdapterCopy


class AddSums(msgspec.Struct, frozen=True, array_like=True, tag="as"):
    """Adds sums to the oldest copy that waits for them."""

    sums: CopySums


class UseCopy(msgspec.Struct, frozen=True, array_like=True, tag="uc"):
    """The next step may use the oldest copy that none may use yet."""


class StartPicture(msgspec.Struct, frozen=True, array_like=True, tag="sp"):
    """Begin to bring a picture's patches. Answered by PictureIn."""

    copy: PictureCopy


class Encode(msgspec.Struct, frozen=True, array_like=True, tag="en"):
    """Launch further work of the tower, of so many pictures where none are under way."""

    pictures: int


class CopyPages(msgspec.Struct, frozen=True, array_like=True, tag="cp"):
    """Begin copies of pages. Answered by PagesCopied."""

    copies: PageCopies


Command = Launch | Constrain | StartCopy | AddSums | UseCopy | StartPicture | Encode | CopyPages
# What the others tell the leader.
Answer = CopyOver | CopySums | PictureIn | PagesCopied

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Command | Answer) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Decode one command of the leader. Raises msgspec.MsgspecError."""
    command: Command = _commands.decode(frame)
    return command


def decode_answer(frame: bytes) -> Answer:
    """Decode one answer of a follower. Raises msgspec.MsgspecError."""
    answer: Answer = _answers.decode(frame)
    return answer
