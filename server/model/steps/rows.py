"""Static rows: the tokens and pages of every running sequence, kept on the device between steps."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from loraplex.server.engine.plan import PageGrant, RowStart, SeqSlice
from loraplex.server.model.ops.transfers import to_device

# (row, first column, values)
Write = tuple[int, int, Sequence[int]]


class Rows:
    """Tokens and pages of all sequences, on the device. tokens: int32 `[rows + 1, max_context +
    1]`, prompt first; a sample is written behind its input, so the next step's input never
    visits the host. page_table: int64 `[groups, rows + 1, pages a row]`. long_rows: int64 `[rows
    + 1]`, 1 where a row was started with more tokens than `short_context`. scratch: the last
    row, which is no sequence's: batches are padded with it.
    """

    def __init__(
        self,
        max_rows: int,
        max_context: int,
        page_size: int,
        device: torch.device,
        short_context: int | None = None,
        groups: int = 1,
    ) -> None:
        """Allocate rows for so many sequences. short_context: see `ModelSpec`. groups: of layers,
        see `PageGroups`.
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

    def start(self, rows: Iterable[RowStart]) -> None:
        rows = list(rows)
        for row in rows:
            self.prompt_len[row.seq_row] = row.prompt_len
        self._scatter(self.tokens, [(r.seq_row, 0, r.token_ids) for r in rows])
        if self._short_context is not None and rows:
            is_long = [len(row.token_ids) > self._short_context for row in rows]
            packed = to_device(np.array([[r.seq_row for r in rows], is_long]), self.device)
            self.long_rows[packed[0]] = packed[1]

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
