"""Patches of a decoded picture, as a model's tower reads them."""

import numpy as np
import numpy.typing as npt

from loraplex.server.protocol import Grid, VisionCard


def write_patches(
    pixels: bytes, grid: Grid, card: VisionCard, patches: npt.NDArray[np.float32]
) -> None:
    """Fills `[rows, columns]` patches with a resized picture. pixels: uint8
    `[height, width, 3]`. A row is a patch; patches that become one token stand together. Equal to
    `pixel_values` of transformers' processor.
    """
    _, high, wide = grid
    size, merge, frames = card.patch_size, card.merge_size, card.temporal_patch_size
    picture = np.frombuffer(pixels, np.uint8).reshape(
        high // merge, merge, size, wide // merge, merge, size, 3
    )
    # Places of patches, then colours, lines and columns of one.
    by_patch = picture.transpose(0, 3, 1, 4, 6, 2, 5)
    shape = (high // merge, wide // merge, merge, merge, 3, frames, size, size)
    target = patches.reshape(shape)
    for colour, levels in enumerate(_levels(card)):
        target[..., colour, 0, :, :] = levels[by_patch[..., colour, :, :]]
    target[..., 1:, :, :] = target[..., :1, :, :]


def _levels(card: VisionCard) -> npt.NDArray[np.float32]:
    """Values of the 256 levels of each colour: float32 `[3, 256]`."""
    level = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean = np.array(card.mean, np.float32)[:, None]
    return (level - mean) / np.array(card.std, np.float32)[:, None]
