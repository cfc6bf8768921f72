"""Draws in plain torch: whatever rows ask for."""

from collections.abc import Callable

import numpy as np
import torch

from server.model.memory import LOGITS_ROWS
from server.model.row_sampling import RowSampling
from server.model.rows import Rows
from server.model.sampling import sample
from server.model.transfers import to_device

_Draw = Callable[[torch.Tensor, np.ndarray, np.ndarray, np.ndarray], torch.Tensor]


def in_pieces(
    draw: _Draw,
    logits: torch.Tensor,
    which: np.ndarray,
    seq_rows: np.ndarray,
    lengths: np.ndarray,
) -> torch.Tensor:
    """`draw` of at most LOGITS_ROWS rows at once; arguments as of `server.model.sampler.Draws`."""
    pieces = [slice(i, i + LOGITS_ROWS) for i in range(0, len(which), LOGITS_ROWS)]
    return torch.cat([draw(logits, which[p], seq_rows[p], lengths[p]) for p in pieces])


class TorchDraws:
    """Implements `server.model.sampler.Draws`."""

    def __init__(self, rows: Rows, parameters: RowSampling) -> None:
        self._rows, self._parameters = rows, parameters

    def __call__(
        self, logits: torch.Tensor, which: np.ndarray, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        return in_pieces(self._draw, logits, which, seq_rows, lengths)

    def _draw(
        self, logits: torch.Tensor, which: np.ndarray, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        rows = self._rows
        scores = logits[to_device(which, rows.device)].float()
        sampled = sample(scores, self._parameters.batch(rows, seq_rows, lengths))
        on_device = to_device(seq_rows, rows.device), to_device(lengths, rows.device)
        rows.append(*on_device, sampled.token_ids)
        return sampled.token_ids.masked_fill(sampled.failed, -1)
