"""Where the patches of a picture lie, and which of them see each other. Pure, but for numpy.

Patches come token by token: the `side * side` patches of a token follow one another, row by row, as
transformers' processors order them.
"""

import numpy as np

from loraplex.server.protocol import Grid, TiledForm


def patch_places(grid: Grid, side: int) -> np.ndarray:
    """Row and column of each patch, int64 `[2, patches]`. grid: (time, height, width)."""
    _, height, width = grid
    blocks = (height // side, side, width // side, side)
    places = np.indices((height, width)).reshape(2, *blocks)
    return places.transpose(0, 1, 3, 2, 4).reshape(2, -1)


def table_taps(grid: Grid, side: int, table_side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a table of `table_side * table_side` positions that each patch lies between, int64
    `[4, patches]`, and their factors, float32 of the same shape. grid: as of `patch_places`."""
    taps = []
    for places, size in zip(patch_places(grid, side), grid[1:], strict=True):
        exact = places.astype(np.float32) * (table_side - 1) / max(size - 1, 1)
        low = np.floor(exact)
        both = np.stack((low, np.minimum(low + 1, table_side - 1))).astype(np.int64)
        nearer = 1 - (exact - low)
        taps.append((both, np.stack((nearer, 1 - nearer))))
    (rows, of_rows), (columns, of_columns) = taps
    found = (rows[:, None] * table_side + columns).reshape(4, -1)
    return found, (of_rows[:, None] * of_columns).reshape(4, -1)


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


def token_order(form: TiledForm, grid: Grid) -> np.ndarray:
    """The patch that each token of a picture is made of, int64 `[tokens]`: all of the picture, then
    the lines of its other tiles without padding. The number of patches stands for a line's end."""
    side, (high, wide) = form.tile, form.padded(grid[0])
    first, of_tiles = np.split(np.arange(form.patches(grid)), [side**2])
    tiles = of_tiles.reshape(high // side, wide // side, side, side)
    lines = tiles.transpose(0, 2, 1, 3).reshape(high, wide)
    top, left = ((most - own) // 2 for most, own in zip((high, wide), grid[1:], strict=True))
    kept = lines[top : top + grid[1], left : left + grid[2]]
    ended = np.pad(kept, ((0, 0), (0, 1)), constant_values=form.patches(grid))
    return np.concatenate((first, ended.reshape(-1)))
