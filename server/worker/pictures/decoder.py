"""Decodes pictures in processes of their own, each tenant in turn, and makes patches of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.adapters.common.awaited_turns import AwaitedTurns
from loraplex.adapters.common.turns import LineFull, Room
from loraplex.adapters.helpers.helper import Helper, HelperStopped, HelperUnavailable
from loraplex.adapters.helpers.pool import HelperPool
from loraplex.server.protocol import ErrorCode, Grid, VisionCard
from loraplex.server.worker.pictures.jobs import CPU_SECONDS, MEMORY_BYTES, DecodeJob, DecodeOutcome
from loraplex.server.worker.pictures.segments import PatchMemory, PatchSegment

PROCESSES = 2
_MODULE = "loraplex.server.worker.pictures.decoding"
_TIMEOUT_S = 60.0
_KIND = "picture"
_MAX_LINE = 1024
_AROUND_BYTES = 4096  # a fault's words
# Patches that fit into a processor's cache with all that is made of them.
_BLOCK = 256


class NoPatches(Exception):
    """A picture has no patches; code, message: of the sequences that wait for it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message


class PictureDecoder:
    """Makes patches of files. Processes start when first needed. memory: where patches lie; who
    asks has made sure that a segment is free."""

    def __init__(self, card: VisionCard, memory: PatchMemory) -> None:
        self._card = card
        self._memory = memory
        most = _AROUND_BYTES + 3 * card.most_seen_pixels
        begin = msgspec.json.encode(card)
        helpers = [Helper(_MODULE, begin, _TIMEOUT_S, most) for _ in range(PROCESSES)]
        self._pool = HelperPool(helpers, "picture")
        room = Room(PROCESSES, max(1, PROCESSES - 1), _MAX_LINE)
        self._turns = AwaitedTurns({_KIND: room})

    @asynccontextmanager
    async def turn(self, tenant: str, is_batch: bool) -> AsyncIterator[None]:
        """A turn to have one file decoded, for what is inside. Raises NoPatches."""
        try:
            turn = await self._turns.enter(_KIND, 1, tenant, is_batch)
        except LineFull as error:
            raise NoPatches("overloaded", "too many pictures wait to be decoded") from error
        try:
            yield
        finally:
            self._turns.leave(turn)

    async def pixels(self, job: DecodeJob) -> bytes:
        """Decodes and resizes a file, in a turn of the caller's. Raises NoPatches."""
        try:
            reply = await self._pool.ask(msgspec.msgpack.encode(job))
            outcome = msgspec.msgpack.decode(reply, type=DecodeOutcome)
        except HelperStopped as error:
            message = (
                f"the picture takes more than {CPU_SECONDS:g} s of processor time or "
                f"{MEMORY_BYTES >> 20} MiB of memory to decode"
            )
            raise NoPatches("invalid_image", message) from error
        except (HelperUnavailable, ValueError) as error:
            raise _not_now(error) from error
        if outcome.fault is not None:
            raise NoPatches("invalid_image", outcome.fault)
        return outcome.pixels

    async def patches(self, pixels: bytes, grid: Grid) -> PatchSegment:
        """Puts a decoded picture's patches into host memory. Raises NoPatches."""
        try:
            return await asyncio.to_thread(self._written, pixels, grid)
        except (OSError, ValueError) as error:
            raise _not_now(error) from error

    async def close(self) -> None:
        """Ends the processes."""
        await self._pool.close()

    def _written(self, pixels: bytes, grid: Grid) -> PatchSegment:
        """Puts a resized picture's patches into host memory. Raises OSError, ValueError."""
        segment = self._memory.segment(self._card.form.patches(grid), self._card.columns)
        try:
            segment.fill(partial(write_patches, pixels, grid, self._card))
        except BaseException:
            segment.remove()
            raise
        return segment


def _not_now(error: Exception) -> NoPatches:
    return NoPatches("overloaded", f"pictures cannot be decoded now: {error}")


def write_patches(
    pixels: bytes, grid: Grid, card: VisionCard, patches: npt.NDArray[np.float32]
) -> None:
    """Fills `[rows, columns]` patches with a resized picture. pixels: uint8
    `[height, width, 3]`, of all tiles. A row is a patch; patches that become one token stand
    together. Equal to `pixel_values` of transformers' processor.
    """
    high, wide = card.form.stack(grid)
    size, merge, frames = card.patch_size, card.form.side, card.temporal_patch_size
    picture = np.frombuffer(pixels, np.uint8).reshape(
        high // merge, merge, size, wide // merge, merge, size, 3
    )
    # Places of patches, then colours, lines and columns of one.
    by_patch = np.ascontiguousarray(picture.transpose(0, 3, 1, 4, 6, 2, 5))
    found = by_patch.reshape(high * wide, 3, size * size)
    shape = (frames, size * size, 3) if card.colours_last else (3, frames, size * size)
    target = patches.reshape(high * wide, *shape)
    target = np.moveaxis(target, 3, 1) if card.colours_last else target
    levels = _levels(card)
    for first in range(0, high * wide, _BLOCK):
        block = slice(first, first + _BLOCK)
        for colour in range(3):
            target[block, colour] = levels[colour].take(found[block, colour])[:, None]


def _levels(card: VisionCard) -> npt.NDArray[np.float32]:
    """Values of the 256 levels of each colour: float32 `[3, 256]`."""
    level = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean = np.array(card.mean, np.float32)[:, None]
    return (level - mean) / np.array(card.std, np.float32)[:, None]
