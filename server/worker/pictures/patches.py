"""Patches of a decoded picture, as a model's tower reads them."""

import numpy as np
import numpy.typing as npt

from loraplex.server.protocol import Grid, VisionCard

# Patches that fit into a processor's cache with all that is made of them.
_BLOCK = 256


def write_patches(
    pixels: bytes, grid: Grid, card: VisionCard, patches: npt.NDArray[np.float32]
) -> None:
    """Fills `[rows, columns]` patches with a resized picture. pixels: uint8
    `[height, width, 3]`, of all tiles. A row is a patch; patches that become one token stand
    together. Equal to `pixel_values` of transformers' processor.
    """
    high, wide = card.form.stack(grid)
    size, merge, frames = card.patch_size, card.form.side, card.temporal_patch_size
    picture = np.frombuffer(pixels, np.uint8).reshape(
        high // merge, merge, size, wide // merge, merge, size, 3
    )
    # Places of patches, then colours, lines and columns of one.
    by_patch = np.ascontiguousarray(picture.transpose(0, 3, 1, 4, 6, 2, 5))
    found = by_patch.reshape(high * wide, 3, size * size)
    shape = (frames, size * size, 3) if card.colours_last else (3, frames, size * size)
    target = patches.reshape(high * wide, *shape)
    target = np.moveaxis(target, 3, 1) if card.colours_last else target
    levels = _levels(card)
    for first in range(0, high * wide, _BLOCK):
        block = slice(first, first + _BLOCK)
        for colour in range(3):
            target[block, colour] = levels[colour].take(found[block, colour])[:, None]


def _levels(card: VisionCard) -> npt.NDArray[np.float32]:
    """Values of the 256 levels of each colour: float32 `[3, 256]`."""
    level = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean = np.array(card.mean, np.float32)[:, None]
    return (level - mean) / np.array(card.std, np.float32)[:, None]
