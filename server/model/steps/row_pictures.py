"""Pictures of a row: how its tokens turn by time, height and width, and which stand for results.

Pure, but for numpy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loraplex.server.engine.executor import PictureLimits
from loraplex.server.engine.plan import PlacedPicture


class _Span(NamedTuple):
    """Tokens of one picture, from its first placeholder on. placeholders: their places in the row,
    int64 `[n]`. first: where the first one lies, by all axes. height, width: in tokens."""

    start: int
    end: int
    placeholders: np.ndarray
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
    tokens where a text would have them; only among theirs may lie tokens of text.
    """

    def __init__(
        self, pictures: Sequence[PlacedPicture], token_ids: Sequence[int], limits: PictureLimits
    ) -> None:
        """pictures: at least one. token_ids: of the row, as far as they are known."""
        found = np.flatnonzero(np.array(token_ids) == limits.token_id)
        self._block_tokens = limits.block_tokens
        self._spans = list[_Span]()
        self.offset = 0
        for picture in pictures:
            height, width = (patches // limits.form.side for patches in picture.grid[1:])
            own = found[found >= picture.start][: limits.form.tokens(picture.grid)]
            place = picture.start, int(own[-1]) + 1, own, picture.start + self.offset
            blocks = np.array(picture.blocks, dtype=np.int64)
            self._spans.append(_Span(*place, height, width, blocks))
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

    def lasts(self, start: int, count: int) -> np.ndarray:
        """The last token that each of `start .. start + count` sees where the tokens of a picture
        see each other, int64 `[count]`."""
        found = np.arange(start, start + count)
        for span in self._spans:
            found[max(span.start - start, 0) : max(span.end - start, 0)] = span.end - 1
        return found

    def results(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens among `start .. start + count` that results stand for, as places from `start`, and
        the rows of the cache that hold these; int64 `[n]` each."""
        at, rows = list[np.ndarray](), list[np.ndarray]()
        for span in self._spans:
            begin, end = np.searchsorted(span.placeholders, (start, start + count))
            block, place = np.divmod(np.arange(begin, end), self._block_tokens)
            at.append(span.placeholders[begin:end] - start)
            rows.append(span.blocks[block] * self._block_tokens + place)
        return np.concatenate(at), np.concatenate(rows)
