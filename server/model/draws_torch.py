"""Draws in plain torch: whatever rows ask for."""

from collections.abc import Callable

import torch

from server.model.memory import LOGITS_ROWS
from server.model.row_sampling import RowSampling
from server.model.rows import Rows
from server.model.sampling import sample
from server.model.to_draw import ToDraw
from server.model.transfers import to_device


def in_pieces(draw: Callable[[ToDraw], torch.Tensor], rows: ToDraw) -> torch.Tensor:
    """`draw` of at most LOGITS_ROWS rows at once."""
    pieces = [slice(i, i + LOGITS_ROWS) for i in range(0, len(rows), LOGITS_ROWS)]
    return torch.cat([draw(rows.pick(piece)) for piece in pieces])


class TorchDraws:
    """Implements `server.model.sampler.Draws`."""

    def __init__(self, rows: Rows, parameters: RowSampling) -> None:
        self._rows, self._parameters = rows, parameters

    def __call__(self, rows: ToDraw) -> torch.Tensor:
        return in_pieces(self._draw, rows)

    def _draw(self, rows: ToDraw) -> torch.Tensor:
        device = self._rows.device
        scores = rows.logits[to_device(rows.which, device)].float()
        asked = self._parameters.batch(self._rows, rows.seq_rows, rows.lengths, rows.masks)
        sampled = sample(scores, asked)
        on_device = to_device(rows.seq_rows, device), to_device(rows.lengths, device)
        self._rows.append(*on_device, sampled.token_ids)
        return sampled.token_ids.masked_fill(sampled.failed, -1)
