"""The rows that draw a token, and their distributions."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from loraplex.server.model.sampling.masks import RowMasks


@dataclass(frozen=True, slots=True)
class ToDraw:
    """Rows that draw a token, and write it behind what each has.

    logits: `[m, vocab]`. which: the logits' row of each. seq_rows: its row of the executor, which
    has `lengths` tokens now. Arrays: int64 `[n]`. masks: what they may draw, None = any token.
    wide: bool `[n]`, which rows may draw ids behind the base's; then the logits have columns for
    these, which mean nothing in the other rows. None = no row may.
    """

    logits: torch.Tensor
    which: np.ndarray
    seq_rows: np.ndarray
    lengths: np.ndarray
    masks: RowMasks | None = None
    wide: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.which)

    def pick(self, chosen: np.ndarray | slice) -> "ToDraw":
        """Return some of the rows. chosen: places of rows, or bool `[n]`."""
        return replace(
            self,
            which=self.which[chosen],
            seq_rows=self.seq_rows[chosen],
            lengths=self.lengths[chosen],
            masks=None if self.masks is None else self.masks.pick(chosen),
            wide=None if self.wide is None else self.wide[chosen],
        )

    def alike(self, vocab: int) -> "list[tuple[np.ndarray, ToDraw]]":
        """Rows that draw from as many ids, and their places. vocab: ids of the base."""
        if self.wide is None:
            return [(np.arange(len(self)), self)]
        found = []
        for is_wide, logits in ((False, self.logits[:, :vocab]), (True, self.logits)):
            places = np.flatnonzero(self.wide == is_wide)
            if places.size:
                found.append((places, replace(self.pick(places), logits=logits, wide=None)))
        return found
