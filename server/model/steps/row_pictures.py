"""Pictures of a row: how its tokens turn by time, height and width, and which stand for results.

Pure, but for numpy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loraplex.server.engine.executor import PictureLimits
from loraplex.server.engine.plan import PlacedPicture


class _Span(NamedTuple):
    """Tokens of one picture. first: where its first token lies, by all axes. height, width: in
    tokens."""

    start: int
    end: int
    first: int
    height: int
    width: int
    blocks: np.ndarray


class RowPictures:
    """The pictures of one row.

    By one axis a text's token lies one place behind the token before it. A picture's tokens lie
    where its first one lies by time, and so many places behind by height and by width as their row
    and column say. The text behind a picture begins as many places behind its first token as the
    longer side has tokens. So where a row's tokens lie behind all pictures is their position and an
    offset, the same by all axes. end: the first token behind all pictures. Flat pictures have their
    tokens where a text would have them.
    """

    def __init__(self, pictures: Sequence[PlacedPicture], limits: PictureLimits) -> None:
        """pictures: at least one."""
        self._block_tokens = limits.block_tokens
        self._spans = list[_Span]()
        self.offset = 0
        for picture in pictures:
            height, width = (patches // limits.side for patches in picture.grid[1:])
            end, first = picture.start + limits.tokens(picture.grid), picture.start + self.offset
            blocks = np.array(picture.blocks, dtype=np.int64)
            self._spans.append(_Span(picture.start, end, first, height, width, blocks))
            if not limits.is_flat:
                self.offset += max(height, width) - height * width
        self.end = self._spans[-1].end

    def places(self, start: int, count: int) -> np.ndarray:
        """Where tokens `start .. start + count` lie by time, height and width, int64 `[3,
        count]`."""
        positions = np.arange(start, start + count)
        if start >= self.end:
            return np.tile(positions + self.offset, (3, 1))
        found = np.tile(positions, (3, 1))
        for span in self._spans:
            inside = (positions >= span.start) & (positions < span.end)
            row, column = np.divmod(positions[inside] - span.start, span.width)
            found[:, inside] = span.first + np.stack((np.zeros_like(row), row, column))
            found[:, positions >= span.end] += max(span.height, span.width) - span.end + span.start
        return found

    def results(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens among `start .. start + count` that results stand for, as places from `start`, and
        the rows of the cache that hold these; int64 `[n]` each."""
        at, rows = list[np.ndarray](), list[np.ndarray]()
        for span in self._spans:
            tokens = np.arange(max(start, span.start), min(start + count, span.end))
            block, place = np.divmod(tokens - span.start, self._block_tokens)
            at.append(tokens - start)
            rows.append(span.blocks[block] * self._block_tokens + place)
        return np.concatenate(at), np.concatenate(rows)
