"""Results of pictures on the device: where they lie, who needs them, which must go. Pure."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.server.engine.executor import PictureLimits
from loraplex.server.protocol import Grid, PictureSpan


class PictureKey(NamedTuple):
    """A picture as a prompt has it. picture: SHA-256 of its file. grid: as of `PictureSpan`.
    acting: as of `GenerateRequest.acting`, where that adapter changes the tower; "" = none does.
    The tower's results depend on all three."""

    picture: str
    grid: Grid
    acting: str = ""

    @classmethod
    def of(cls, span: PictureSpan, acting: str = "") -> "PictureKey":
        """The key of a picture of a prompt."""
        return cls(span.picture, span.grid, acting)


def blocks_of(
    spans: Iterable[PictureSpan], limits: PictureLimits, acting: str = ""
) -> dict[PictureKey, int]:
    """How many blocks each picture of a prompt takes."""
    return {
        PictureKey.of(span, acting): limits.blocks(limits.form.tokens(span.grid)) for span in spans
    }


@dataclass(slots=True)
class PictureEntry:
    """A place for a picture's results. leases: of sequences that read them. has_patches: they have
    come from the worker. is_ready: steps that are launched from now on may read them."""

    blocks: tuple[int, ...]
    leases: int = 0
    has_patches: bool = False
    is_ready: bool = False


class PictureCache:
    """Blocks of results. Results without leases are kept until others need their blocks, the oldest
    go first. What is not ready has leases, or patches on their way.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._entries: dict[PictureKey, PictureEntry] = {}
        self._idle: OrderedDict[PictureKey, None] = OrderedDict()  # ready, without leases

    def __getitem__(self, key: PictureKey) -> PictureEntry:
        return self._entries[key]

    def get(self, key: PictureKey) -> PictureEntry | None:
        return self._entries.get(key)

    def of(self, picture: str, grid: Grid) -> list[PictureKey]:
        """The places of a picture whose patches have not come, one for each adapter."""
        return [
            key
            for key, entry in self._entries.items()
            if key[:2] == (picture, grid) and not entry.has_patches
        ]

    @property
    def available(self) -> int:
        """Blocks that are free, or hold what nobody reads."""
        return len(self._free) + sum(len(self._entries[key].blocks) for key in self._idle)

    def take(self, wanted: dict[PictureKey, int]) -> bool:
        """Take a lease on each picture, all of them or none. wanted: how many blocks each takes.
        False: they have no room beside what others read.
        """
        missing = sum(blocks for key, blocks in wanted.items() if key not in self._entries)
        kept = sum(len(self._entries[key].blocks) for key in wanted if key in self._idle)
        if missing > self.available - kept:
            return False
        for key in wanted:
            self._idle.pop(key, None)
        while len(self._free) < missing:
            self.drop(next(iter(self._idle)))
        for key, blocks in wanted.items():
            if key not in self._entries:
                place = tuple(self._free.pop() for _ in range(blocks))
                self._entries[key] = PictureEntry(place)
            self._entries[key].leases += 1
        return True

    def release(self, keys: Collection[PictureKey]) -> None:
        """Give up one lease each. What nobody waits for, and has not come, is dropped."""
        for key in keys:
            entry = self._entries[key]
            entry.leases -= 1
            if not entry.leases:
                self._settle(key, entry)

    def finish(self, key: PictureKey) -> None:
        """The results are there, for steps launched from now on."""
        entry = self._entries[key]
        entry.is_ready = True
        if not entry.leases:
            self._settle(key, entry)

    def drop(self, key: PictureKey) -> None:
        """Forget a picture, and free its blocks."""
        entry = self._entries.pop(key)
        self._idle.pop(key, None)
        self._free += entry.blocks

    def _settle(self, key: PictureKey, entry: PictureEntry) -> None:
        if entry.is_ready:
            self._idle[key] = None
        elif not entry.has_patches:
            self.drop(key)
