"""Static rows: the tokens and pages of every running sequence, kept on the device between steps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from loraplex.server.engine.executor import PictureLimits
from loraplex.server.engine.plan import PageGrant, PlacedPicture, RowStart, SeqSlice
from loraplex.server.model.ops.transfers import to_device

# (row, first column, values)
Write = tuple[int, int, Sequence[int]]


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


class Rows:
    """Tokens and pages of all sequences, on the device. tokens: int32 `[rows + 1, max_context +
    1]`, prompt first; a sample is written behind its input, so the next step's input never
    visits the host. page_table: int64 `[groups, rows + 1, pages a row]`. long_rows: int64 `[rows
    + 1]`, 1 where a row was started with more tokens than `short_context`. offsets: int64 `[rows +
    1]`, how far behind its position a row's token turns, as of `RowPictures`; None where tokens
    turn by their positions. scratch: the last row, which is no sequence's: batches are padded with
    it.
    """

    def __init__(
        self,
        max_rows: int,
        max_context: int,
        page_size: int,
        device: torch.device,
        short_context: int | None = None,
        groups: int = 1,
        pictures: PictureLimits | None = None,
    ) -> None:
        """Allocate rows for so many sequences. short_context: see `ModelSpec`. groups: of layers,
        see `PageGroups`. pictures: as of `ExecutorLimits`.
        """
        self.device = device
        self._short_context = short_context
        self.scratch = max_rows
        self.tokens = torch.zeros(max_rows + 1, max_context + 1, dtype=torch.int32, device=device)
        # An even number: each group's part begins at a multiple of 16 bytes.
        pages = -(-max_context // (2 * page_size)) * 2
        shape = (groups, max_rows + 1, pages)
        self.page_table = torch.zeros(shape, dtype=torch.int64, device=device)
        self.long_rows = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.prompt_len = np.zeros(max_rows, dtype=np.int64)
        self._picture_limits = pictures
        self._pictures: dict[int, RowPictures] = {}
        is_flat = pictures is None or pictures.is_flat
        self.offsets = None if is_flat else torch.zeros_like(self.long_rows)
        self._has_offset = set[int]()

    def start(self, rows: Iterable[RowStart]) -> None:
        rows = list(rows)
        for row in rows:
            self.prompt_len[row.seq_row] = row.prompt_len
        self._scatter(self.tokens, [(r.seq_row, 0, r.token_ids) for r in rows])
        if self._short_context is not None and rows:
            is_long = [len(row.token_ids) > self._short_context for row in rows]
            packed = to_device(np.array([[r.seq_row for r in rows], is_long]), self.device)
            self.long_rows[packed[0]] = packed[1]
        if self._picture_limits is not None:
            self._start_pictures(rows, self._picture_limits)

    def _start_pictures(self, rows: Sequence[RowStart], limits: PictureLimits) -> None:
        """Take the pictures of rows that begin, or begin again without them."""
        changed = {row.seq_row: 0 for row in rows if row.seq_row in self._has_offset}
        for row in rows:
            self._pictures.pop(row.seq_row, None)
            if row.pictures:
                own = RowPictures(row.pictures, row.token_ids, limits)
                self._pictures[row.seq_row], changed[row.seq_row] = own, own.offset
        if changed and self.offsets is not None:
            self._has_offset -= changed.keys()
            self._has_offset |= {row for row, offset in changed.items() if offset}
            packed = to_device(np.array([[*changed], [*changed.values()]]), self.device)
            self.offsets[packed[0]] = packed[1]

    def free(self, rows: Iterable[int]) -> None:
        """Forget the pictures of rows that are nobody's."""
        for row in rows if self._pictures else ():
            self._pictures.pop(row, None)

    def reads_pictures(self, slices: Iterable[SeqSlice]) -> bool:
        """Whether a slice has tokens of a picture, or tokens before one."""
        if not self._pictures:
            return False
        found = ((self._pictures.get(piece.seq_row), piece.start) for piece in slices)
        return any(own is not None and start < own.end for own, start in found)

    def turns(
        self, seq_rows: np.ndarray, starts: np.ndarray, num_new: np.ndarray, positions: np.ndarray
    ) -> np.ndarray | None:
        """Where the tokens of slices lie, as of `StepLayout.turns`, on the host; None = where their
        positions say, int64 `[tokens]`. Other arrays: as of `StepLayout`.
        """
        if self.offsets is None or not self._pictures:
            return None
        owners = list(self._owners(seq_rows, starts, num_new))
        if not owners:
            return None
        found = np.tile(positions, (3, 1))
        for own, start, tokens in owners:
            found[:, tokens] = own.places(start, tokens.stop - tokens.start)
        return found

    def lasts(
        self, seq_rows: np.ndarray, starts: np.ndarray, num_new: np.ndarray, positions: np.ndarray
    ) -> np.ndarray | None:
        """The last token that each sees, as of `StepLayout.lasts`. Arrays: as of `turns`."""
        limits = self._picture_limits
        if limits is None or not limits.is_joined:
            return None
        found = positions.copy()
        for own, start, tokens in self._owners(seq_rows, starts, num_new):
            if start < own.end:
                found[tokens] = own.lasts(start, tokens.stop - tokens.start)
        return found

    def _owners(
        self, seq_rows: np.ndarray, starts: np.ndarray, num_new: np.ndarray
    ) -> Iterator[tuple[RowPictures, int, slice]]:
        """For each slice whose row has pictures: these, its start, and its tokens in the batch."""
        slices = zip(seq_rows.tolist(), starts.tolist(), np.cumsum(num_new).tolist(), strict=True)
        for count, (row, start, end) in zip(num_new.tolist(), slices, strict=True):
            own = self._pictures.get(row)
            if own is not None:
                yield own, start, slice(end - count, end)

    def results(
        self, seq_rows: np.ndarray, starts: np.ndarray, num_new: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Places in the batch of tokens that results of pictures stand for, and these results' rows
        in the cache, int64 `[n]` each. Arrays: as of `StepLayout`.
        """
        places, rows = list[np.ndarray](), list[np.ndarray]()
        for own, start, tokens in self._owners(seq_rows, starts, num_new):
            if start < own.end:
                at, of_slice = own.results(start, tokens.stop - tokens.start)
                places.append(tokens.start + at)
                rows.append(of_slice)
        return np.concatenate(places), np.concatenate(rows)

    def grant(self, grants: Iterable[PageGrant]) -> None:
        _, rows, pages = self.page_table.shape
        writes: list[Write] = [(g.group * rows + g.seq_row, g.first, g.pages) for g in grants]
        self._scatter(self.page_table.view(-1, pages), writes)

    def write_inputs(self, slices: Iterable[SeqSlice]) -> None:
        """Slices may bring their inputs; those without have them here already."""
        self._scatter(
            self.tokens, [(s.seq_row, s.start, s.token_ids) for s in slices if s.token_ids]
        )

    def append(self, rows: torch.Tensor, places: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write samples; all int64 `[n]` on the device."""
        self.tokens[rows, places] = token_ids.to(torch.int32)

    def _scatter(self, table: torch.Tensor, writes: list[Write]) -> None:
        if not writes:
            return
        lengths = [len(values) for _, _, values in writes]
        rows = np.repeat([row for row, _, _ in writes], lengths)
        columns = np.concatenate([np.arange(f, f + len(v)) for _, f, v in writes])
        values = np.concatenate([np.asarray(v, dtype=np.int64) for _, _, v in writes])
        packed = to_device(np.stack((rows, columns, values)), self.device)
        table[packed[0], packed[1]] = packed[2].to(table.dtype)
