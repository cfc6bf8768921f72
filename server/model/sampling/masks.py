"""Masks of tokens, the rows that draw a token, and their distributions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from loraplex.server.engine.executor import Masks
from loraplex.server.model.ops.transfers import to_device


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Tokens that rows may draw.

    host, bits: int32 `[masks, words]` on the host and on the device, as `Masks.bits`.
    of: int64 `[n]`, each row's mask, -1 = the row may draw any token.
    """

    host: np.ndarray
    bits: torch.Tensor
    of: np.ndarray

    def pick(self, chosen: np.ndarray | slice) -> "RowMasks":
        """Return the masks of some rows. chosen: places of rows, or bool `[n]`."""
        return replace(self, of=self.of[chosen])

    def allows_others(self, row: int, ids: np.ndarray, vocab_size: int) -> bool:
        """Whether the row may draw a token that is not among `ids`, int64. vocab_size: of the base;
        a mask of more words has no bits behind its last id."""
        mask = int(self.of[row])
        if mask < 0:
            return True
        words = self.host[mask].view(np.uint32).copy()
        np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        if vocab_size % 32 and len(words) == -(-vocab_size // 32):
            words[-1] &= np.uint32((1 << vocab_size % 32) - 1)
        return bool(words.any())


class MaskMemory:
    """Memory of the host that masks are written to. On a GPU it is pinned memory of torch's cache,
    which reuses a block only when its copy is over.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows, self._device = max_rows, device
        self._taken = self._allocate(0)

    def _allocate(self, words: int) -> torch.Tensor:
        # Always as many rows, so that the cache has a block that fits.
        shape, pinned = (self._max_rows, words), self._device.type == "cuda"
        return torch.empty(shape, dtype=torch.int32, pin_memory=pinned)

    def take(self, count: int, words: int) -> np.ndarray:
        """Take memory for masks: int32 `[count, words]` of any content, for the next `upload`.
        Threads may still write into what was taken before.
        """
        self._taken = self._allocate(words)
        memory: np.ndarray = self._taken[:count].numpy()
        return memory

    def upload(self, masks: Masks, slices: Sequence[int]) -> RowMasks | None:
        """Copy masks to the device. One copy, without waiting for it. slices: places in the plan of
        the rows that draw.

        Returns None where no row has a mask. Raises ValueError for a mask of another slice.
        """
        places = {index: mask for mask, index in enumerate(masks.slices)}
        of = np.array([places.get(index, -1) for index in slices], dtype=np.int64)
        if np.count_nonzero(of >= 0) != len(masks.slices):
            raise ValueError("a mask is for a slice whose draw does not wait for one")
        if not masks.slices:
            return None
        return RowMasks(masks.bits, self._to_device(masks.bits), of)

    def _to_device(self, bits: np.ndarray) -> torch.Tensor:
        taken = self._taken[: len(bits)]
        if self._device.type == "cuda" and bits.ctypes.data == taken.data_ptr():
            return taken.to(self._device, non_blocking=True)
        return to_device(bits, self._device)


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
