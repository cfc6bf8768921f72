"""The questions that the decoding process answers, and its limits. Pure."""

import msgspec

from loraplex.server.protocol import UNBOUNDED, Grid, PixelBounds

CPU_SECONDS = 10.0
MEMORY_BYTES = 2 << 30


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """A picture to decode. data: its file. grid: the patches that its headers promise. pixels: as
    of `PictureSpan`."""

    data: bytes
    grid: Grid
    pixels: PixelBounds = UNBOUNDED


class DecodeOutcome(msgspec.Struct, frozen=True, array_like=True):
    """A resized picture, or why there is none. pixels: red, green and blue of each, row by row, for
    so many patches as the job's grid has.
    """

    pixels: bytes = b""
    fault: str | None = None
