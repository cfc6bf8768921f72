"""Which program of decode attention takes which piece of which context. Pure."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import triton.language as tl

# Below so many tokens a piece costs more than it saves.
MIN_PIECE = 256
# Pieces begin at multiples of so many tokens.
PIECE_STEP = tl.constexpr(64)

T = TypeVar("T", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """Pieces of contexts, one program for each and each kv head.

    items: int32 `[2, max_items]`: sequence (-1 = no work) and which piece of it; those of one
    sequence are neighbours. piece: int32 `[1]`, tokens of a piece.
    """

    items: torch.Tensor
    piece: torch.Tensor


def max_items(batch: int) -> int:
    """Programs a kv head in a batch: one a sequence, and some for pieces of long contexts."""
    return batch + 32 + batch // 2


def cut_contexts(contexts: np.ndarray, items: np.ndarray, window: int | None = None) -> int:
    """Cut contexts into pieces of about equal work. contexts: int `[batch]`, tokens of each
    sequence, its new one included; window: how many of them it attends to, None = all. Fills
    items, int32 `[2, max_items(batch)]` as in DecodeItems, and returns the tokens of a piece.
    First pieces begin at or before the first token seen.
    """
    seen = contexts
    if window is not None:
        seen = contexts - np.maximum(contexts - window, 0) // PIECE_STEP.value * PIECE_STEP.value
    spare = items.shape[1] - len(seen)
    piece = max(MIN_PIECE, -(-int(seen.sum()) // spare))
    piece = -(-piece // PIECE_STEP.value) * PIECE_STEP.value
    pieces = -(-seen // piece)
    total = int(pieces.sum())
    items[0, :total] = np.repeat(np.arange(len(seen)), pieces)
    items[1, :total] = np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    items[0, total:] = -1
    return int(piece)


class WorkLayout:
    """Layout of a batch's items in one int32 upload, the same on the host and on the device: one
    set for each window of a model.
    """

    def __init__(self, windows: tuple[int | None, ...], batch: int) -> None:
        """Lay out items for each of `windows`, no two alike, and at most `batch` sequences."""
        self._windows, self._max_items = windows, max_items(batch)
        self._stride = 2 * self._max_items + 1
        self.length = len(windows) * self._stride

    def cut(self, contexts: np.ndarray, packed: np.ndarray, first: int = 0) -> None:
        """Cut the contexts for each window, and write the items to `packed`. packed: int32
        `[length]`, filled. contexts: as of `cut_contexts`, perhaps none; their sequences have
        numbers from `first` on.
        """
        for window, (items, piece) in zip(self._windows, self._parts(packed), strict=True):
            items[0] = -1
            if len(contexts):
                piece[0] = cut_contexts(contexts, items, window)
                items[0, items[0] >= 0] += first

    def items(self, packed: torch.Tensor) -> tuple[DecodeItems, ...]:
        """Return views of packed, int32 `[length]`, as items for each window."""
        return tuple(DecodeItems(items, piece) for items, piece in self._parts(packed))

    def _parts(self, packed: T) -> list[tuple[T, T]]:
        sets = packed[: self.length].reshape(len(self._windows), self._stride)
        return [(each[:-1].reshape(2, self._max_items), each[-1:]) for each in sets]
