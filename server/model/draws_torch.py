"""Draws in plain torch: whatever rows ask for."""

import numpy as np
import torch

from server.model.row_sampling import RowSampling
from server.model.rows import Rows
from server.model.sampling import sample
from server.model.transfers import to_device


class TorchDraws:
    """Implements `server.model.sampler.Draws`."""

    def __init__(self, rows: Rows, parameters: RowSampling) -> None:
        self._rows, self._parameters = rows, parameters

    def __call__(
        self, logits: torch.Tensor, which: np.ndarray, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        rows = self._rows
        scores = logits[to_device(which, rows.device)].float()
        sampled = sample(scores, self._parameters.batch(rows, seq_rows, lengths))
        on_device = to_device(seq_rows, rows.device), to_device(lengths, rows.device)
        rows.append(*on_device, sampled.token_ids)
        return sampled.token_ids.masked_fill(sampled.failed, -1)
