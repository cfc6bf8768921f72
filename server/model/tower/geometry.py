"""Where the patches of a picture lie, and which of them see each other. Pure, but for numpy.

Patches come token by token: the `side * side` patches of a token follow one another, row by row, as
transformers' processors order them.
"""

import numpy as np

Grid = tuple[int, int, int]


def patch_places(grid: Grid, side: int) -> np.ndarray:
    """Row and column of each patch, int64 `[2, patches]`. grid: one picture's patches by (time,
    height, width).
    """
    _, height, width = grid
    blocks = (height // side, side, width // side, side)
    places = np.indices((height, width)).reshape(2, *blocks)
    return places.transpose(0, 1, 3, 2, 4).reshape(2, -1)


def window_table(grid: Grid, side: int, window: int) -> np.ndarray:
    """Patches of each window of `window * window` tokens, int64 `[windows, most]`; -1 fills up
    those at the picture's edges, which may be smaller.
    """
    height, width = grid[1] // side, grid[2] // side
    row, column = np.divmod(np.arange(height * width), width)
    of = row // window * -(-width // window) + column // window
    order, counts = np.argsort(of, kind="stable"), np.bincount(of)
    begins = np.cumsum(counts) - counts
    tokens = np.full((len(counts), counts.max()), -1)
    tokens[of[order], np.arange(len(of)) - np.repeat(begins, counts)] = order
    patches = tokens[:, :, None] * side**2 + np.arange(side**2)
    patches[tokens < 0] = -1
    return patches.reshape(len(tokens), -1)
