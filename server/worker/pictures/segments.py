"""Host memory that carries patches from the worker to the engine, behind the host arena."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from loraplex.server.engine.shared_memory import HostMemory
from loraplex.server.protocol import VisionCard

# In host memory at once. The engine takes each as it comes.
MAX_SEGMENTS = 8
# A huge page holds patches of one picture alone, so all of it is given back.
_ALIGNED = 2 << 20


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def memory_bytes(arena_bytes: int, vision: VisionCard | None) -> int:
    """Bytes of a host memory with an arena, and behind that with patches of `MAX_SEGMENTS` pictures
    of the largest size. What no picture fills takes no room of the machine."""
    if vision is None:
        return arena_bytes
    return _aligned(arena_bytes) + MAX_SEGMENTS * _slot_bytes(vision)


def _slot_bytes(vision: VisionCard) -> int:
    rows = -(-vision.most_seen_pixels // vision.patch_size**2)
    return _aligned(4 * rows * vision.columns)


class PatchMemory:
    """The part of host memory that has room for `MAX_SEGMENTS` segments."""

    def __init__(self, memory: HostMemory, arena_bytes: int, vision: VisionCard) -> None:
        """memory: of `memory_bytes`."""
        self._memory = memory
        self._slot_bytes = _slot_bytes(vision)
        first = _aligned(arena_bytes)
        self._free = [first + number * self._slot_bytes for number in range(MAX_SEGMENTS)]

    def segment(self, rows: int, columns: int) -> "PatchSegment":
        """Takes a segment, of which one must be free. Raises OSError when the machine has no
        memory, ValueError when a segment is too small."""
        if 4 * rows * columns > self._slot_bytes:
            raise ValueError(f"{rows} patches are more than the largest picture has")
        begin = self._free.pop()
        try:
            self._memory.make(begin, 4 * rows * columns)
        except OSError:
            self._give_back(begin)
            raise
        return PatchSegment(self._memory.view, begin, (rows, columns), self._give_back)

    def _give_back(self, begin: int) -> None:
        self._memory.give_back(begin, self._slot_bytes)
        self._free.append(begin)


class PatchSegment:
    """Memory of float32 `[rows, columns]`, until `remove`. begin: its first byte in host memory."""

    def __init__(
        self,
        memory: memoryview,
        begin: int,
        shape: tuple[int, int],
        give_back: Callable[[int], None],
    ) -> None:
        self.begin = begin
        self.rows, self.columns = shape
        self._memory = memory[begin : begin + 4 * self.rows * self.columns]
        self._give_back = give_back

    def fill(self, write: Callable[[npt.NDArray[np.float32]], None]) -> None:
        """Has `write` put the numbers there."""
        write(np.frombuffer(self._memory, np.float32).reshape(self.rows, self.columns))

    def remove(self) -> None:
        """Gives the memory back to the machine."""
        self._give_back(self.begin)
