"""Which rows draw a token, and from what."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from server.model.sampling.masks import RowMasks


@dataclass(frozen=True, slots=True)
class ToDraw:
    """Rows that draw a token, and write it behind what each has.

    logits: `[m, vocab]`. which: the logits' row of each. seq_rows: its row of the executor, which
    has `lengths` tokens now. Arrays: int64 `[n]`. masks: what they may draw, None = any token.
    """

    logits: torch.Tensor
    which: np.ndarray
    seq_rows: np.ndarray
    lengths: np.ndarray
    masks: RowMasks | None = None

    def __len__(self) -> int:
        return len(self.which)

    def pick(self, chosen: np.ndarray | slice) -> "ToDraw":
        """chosen: places of rows, or bool `[n]`."""
        return replace(
            self,
            which=self.which[chosen],
            seq_rows=self.seq_rows[chosen],
            lengths=self.lengths[chosen],
            masks=None if self.masks is None else self.masks.pick(chosen),
        )
