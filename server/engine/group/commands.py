"""The pipe between the processes of one engine: what the leader has the others do, too. Pure."""

from typing import Protocol

import msgspec
import numpy as np

from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyOver,
    CopySums,
    Executor,
    Masks,
    PageCopies,
    PagesCopied,
    PictureCopy,
    PictureIn,
    T,
)
from loraplex.server.engine.plan import StepPlan


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
