"""Draws in plain torch: whatever rows ask for."""

from collections.abc import Callable

import torch

from loraplex.server.model.ops.memory import LOGITS_ROWS
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.sampling.row_sampling import RowSampling
from loraplex.server.model.sampling.sampling import Sampled, sample
from loraplex.server.model.sampling.to_draw import ToDraw
from loraplex.server.model.steps.rows import Rows


def in_pieces(
    draw: Callable[[ToDraw], torch.Tensor], rows: ToDraw, at_once: int = LOGITS_ROWS
) -> torch.Tensor:
    """Call `draw` for at most so many rows at once, and join the results."""
    pieces = [slice(i, i + at_once) for i in range(0, len(rows), at_once)]
    return torch.cat([draw(rows.pick(piece)) for piece in pieces])


class TorchDraws:
    """Draw tokens with plain torch; implements `loraplex.server.model.sampling.sampler.Draws`."""

    def __init__(self, rows: Rows, parameters: RowSampling, at_once: int = LOGITS_ROWS) -> None:
        """Draw for rows with these parameters. at_once: rows that are computed together: a GPU's
        running sums depend on their number."""
        self._rows, self._parameters, self._at_once = rows, parameters, at_once

    def __call__(self, rows: ToDraw) -> torch.Tensor:
        return in_pieces(self._draw, rows, self._at_once)

    def _draw(self, rows: ToDraw) -> torch.Tensor:
        sampled = self.sampled(rows)
        return sampled.token_ids.masked_fill(sampled.failed, -1)

    def sampled(self, rows: ToDraw) -> Sampled:
        """Draw and append, and return the logits of the draw, too. For at most LOGITS_ROWS rows."""
        device = self._rows.device
        scores = rows.logits[to_device(rows.which, device)].float()
        asked = self._parameters.batch(self._rows, rows.seq_rows, rows.lengths, rows.masks)
        sampled = sample(scores, asked)
        on_device = to_device(rows.seq_rows, device), to_device(rows.lengths, device)
        self._rows.append(*on_device, sampled.token_ids)
        return sampled
