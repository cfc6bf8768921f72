"""Draws on a GPU: by our kernels but for typical_p, after torch has applied the history's terms."""

import numpy as np
import torch

from server.kernels.draw import DrawRows, draw_append
from server.kernels.greedy import GreedyScratch
from server.model.draws_torch import TorchDraws, in_pieces
from server.model.row_sampling import RowSampling
from server.model.rows import Rows
from server.model.sampling import apply_history
from server.model.transfers import to_device


class CudaDraws:
    """Implements `server.model.sampler.Draws`."""

    def __init__(self, rows: Rows, parameters: RowSampling) -> None:
        self._rows, self._parameters = rows, parameters
        self._scratch = GreedyScratch(len(rows.tokens), rows.device)
        self._others = TorchDraws(rows, parameters)

    def warm(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Compiles for the logits of a step, and for those of rows with a history."""
        scratch = np.array([self._rows.scratch])
        for kind, finite in ((dtype, True), (torch.float32, False)):
            logits = torch.zeros(1, vocab_size, dtype=kind, device=self._rows.device)
            self._draw(logits, np.zeros(1, np.int64), scratch, np.zeros(1, np.int64), finite=finite)

    def __call__(
        self, logits: torch.Tensor, which: np.ndarray, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        typical, history = self._parameters.special(self._rows, seq_rows, lengths)
        drawn = torch.empty(len(which), dtype=torch.int32, device=self._rows.device)
        for chosen, draw in (
            (~(typical | history), self._raw),
            (history & ~typical, self._with_history),
            (typical, self._others),
        ):
            if chosen.all():
                return draw(logits, which, seq_rows, lengths)
            if chosen.any():
                found = draw(logits, which[chosen], seq_rows[chosen], lengths[chosen])
                places = to_device(np.flatnonzero(chosen), self._rows.device)
                drawn.index_copy_(0, places, found.to(drawn.dtype))
        return drawn

    def _raw(
        self, logits: torch.Tensor, which: np.ndarray, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        return self._draw(logits, which, seq_rows, lengths, finite=True)

    def _with_history(
        self, logits: torch.Tensor, which: np.ndarray, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        return in_pieces(self._penalised, logits, which, seq_rows, lengths)

    def _penalised(
        self, logits: torch.Tensor, which: np.ndarray, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        scores = logits[to_device(which, self._rows.device)].float()
        failed = ~torch.isfinite(scores).all(dim=-1)
        apply_history(scores, self._parameters.history(self._rows, seq_rows, lengths))
        drawn = self._draw(scores, np.arange(len(which)), seq_rows, lengths, finite=False)
        return drawn.masked_fill_(failed, -1)

    def _draw(
        self,
        logits: torch.Tensor,
        which: np.ndarray,
        seq_rows: np.ndarray,
        lengths: np.ndarray,
        *,
        finite: bool,
    ) -> torch.Tensor:
        packed = np.stack((which, seq_rows, lengths)).astype(np.int32)
        of = DrawRows(*to_device(packed, self._rows.device))
        tokens, parameters = self._rows.tokens, self._parameters.table
        return draw_append(logits, of, parameters, tokens, self._scratch, finite=finite)
