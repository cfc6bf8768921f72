"""Draws on a GPU: by our kernels but for typical_p, after torch has applied the history's terms."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from loraplex.server.kernels.sampling.draw import DrawRows, draw_append
from loraplex.server.kernels.sampling.greedy import DrawMasks, GreedyScratch
from loraplex.server.model.ops.memory import LOGITS_ROWS
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.sampling.masks import RowMasks, ToDraw
from loraplex.server.model.sampling.sampler import TorchDraws, in_pieces
from loraplex.server.model.sampling.sampling import RowSampling, apply_history
from loraplex.server.model.steps.rows import Rows


class CudaDraws:
    """Draw tokens on a GPU; implements `loraplex.server.model.sampling.sampler.Draws`."""

    def __init__(
        self, rows: Rows, parameters: RowSampling, most: int, at_once: int = LOGITS_ROWS
    ) -> None:
        """Allocate scratch for the draws of a step. most: draws of a step. at_once: as of
        TorchDraws."""
        self._rows, self._parameters = rows, parameters
        self._scratch = GreedyScratch(most, rows.device)
        self._others = TorchDraws(rows, parameters, at_once)

    def warm(self, num_ids: int, dtype: torch.dtype) -> None:
        """Compiles for the logits of a step, and for those of rows with a history; without masks
        and with them. num_ids: columns of the logits."""
        device, none = self._rows.device, np.zeros(1, np.int64)
        words = np.full((1, -(-num_ids // 32)), -1, dtype=np.int32)
        for masks in (None, RowMasks(words, to_device(words, device), none)):
            for kind, finite in ((dtype, True), (torch.float32, False)):
                logits = torch.zeros(1, num_ids, dtype=kind, device=device)
                scratch = np.array([self._rows.scratch])
                self._draw(ToDraw(logits, none, scratch, none, masks), finite=finite)

    def __call__(self, rows: ToDraw) -> torch.Tensor:
        typical, history = self._parameters.special(self._rows, rows.seq_rows, rows.lengths)
        drawn = torch.empty(len(rows), dtype=torch.int32, device=self._rows.device)
        for chosen, draw in (
            (~(typical | history), partial(self._draw, finite=True)),
            (history & ~typical, partial(in_pieces, self._penalised)),
            (typical, self._others),
        ):
            if chosen.all():
                return draw(rows)
            if chosen.any():
                found = draw(rows.pick(chosen))
                places = to_device(np.flatnonzero(chosen), self._rows.device)
                drawn.index_copy_(0, places, found.to(drawn.dtype))
        return drawn

    def _penalised(self, rows: ToDraw) -> torch.Tensor:
        scores = rows.logits[to_device(rows.which, self._rows.device)].float()
        failed = ~torch.isfinite(scores).all(dim=-1)
        asked = self._parameters.history(self._rows, rows.seq_rows, rows.lengths, rows.masks)
        apply_history(scores, asked)
        changed = replace(rows, logits=scores, which=np.arange(len(rows)))
        return self._draw(changed, finite=False).masked_fill_(failed, -1)

    def _draw(self, rows: ToDraw, *, finite: bool) -> torch.Tensor:
        columns = [rows.which, rows.seq_rows, rows.lengths]
        if rows.masks is not None:
            columns.append(rows.masks.of)
        packed = to_device(np.stack(columns).astype(np.int32), self._rows.device)
        masks = None if rows.masks is None else DrawMasks(rows.masks.bits, packed[3])
        of = DrawRows(packed[0], packed[1], packed[2], masks)
        tokens, parameters = self._rows.tokens, self._parameters.table
        return draw_append(rows.logits, of, parameters, tokens, self._scratch, finite=finite)
