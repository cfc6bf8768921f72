"""TIES and DARE on the true deltas `scale * B A` of one module.

Sources: TIES-Merging (arXiv:2306.01708), DARE (arXiv:2311.03099); details (what is trimmed, when
weights enter, how signs are elected) are those of PEFT 0.21's `ties_svd` and `dare_*_svd`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.adapters.merge.low_rank import Matrix
from loraplex.adapters.merge.recipe import MergeRecipe, SignMethod

Mask = npt.NDArray[np.bool_]
_BLOCK_VALUES = 1 << 21


class MemberDelta(NamedTuple):
    """One member's delta of the module, `b @ a`, with its weight. member: its place."""

    member: int
    weight: float
    b: Matrix
    a: Matrix


def merge_deltas(deltas: Sequence[MemberDelta], recipe: MergeRecipe, path: str) -> Matrix:
    """The merged delta, `[out_features, in_features]`. One such matrix more is held meanwhile."""
    keepers = [_keeper(delta, recipe, path) for delta in deltas]
    merged = np.empty((len(deltas[0].b), deltas[0].a.shape[1]), np.float32)
    for rows in _row_blocks(*merged.shape):
        kept = [
            keep.block(delta.b[rows] @ delta.a) for delta, keep in zip(deltas, keepers, strict=True)
        ]
        merged[rows] = _combine(kept, [delta.weight for delta in deltas], recipe)
    return merged


def draw_seed(recipe: MergeRecipe, *names: str) -> int:
    """The seed of one random draw of the recipe; another name, another draw."""
    text = "\0".join((recipe.digest, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


class RandomKeeper:
    """DARE: keeps each value with probability `density`, and scales what is kept to make up."""

    def __init__(self, density: float, seed: int) -> None:
        self._density = np.float32(density)
        self._rng = np.random.default_rng(seed)

    def mask(self, shape: tuple[int, ...]) -> Mask:
        """The next rows' mask."""
        return self._rng.random(shape, dtype=np.float32) < self._density

    def block(self, values: Matrix) -> Matrix:
        return values * self.mask(values.shape) / self._density


class LargestKeeper:
    """TIES: keeps the share `density` of values that are largest in magnitude, equal ones all."""

    def __init__(self, delta: MemberDelta, density: float) -> None:
        self._least = _magnitude(delta, density)

    def block(self, values: Matrix) -> Matrix:
        return np.where(np.abs(values) >= self._least, values, np.float32(0))


def _keeper(delta: MemberDelta, recipe: MergeRecipe, path: str) -> RandomKeeper | LargestKeeper:
    if recipe.strategy == "ties":
        return LargestKeeper(delta, recipe.density)
    return RandomKeeper(recipe.density, draw_seed(recipe, path, str(delta.member)))


def _magnitude(delta: MemberDelta, density: float) -> float:
    """The least magnitude that is kept; computed as the blocks are, so that they compare equal."""
    if density >= 1:
        return 0.0
    magnitudes = np.empty((len(delta.b), delta.a.shape[1]), np.float32)
    for rows in _row_blocks(*magnitudes.shape):
        np.abs(delta.b[rows] @ delta.a, out=magnitudes[rows])
    kept = int(density * magnitudes.size)
    if kept == 0:
        return float("inf")
    flat = magnitudes.reshape(-1)
    flat.partition(flat.size - kept)
    return float(flat[flat.size - kept])


def _combine(kept: Sequence[Matrix], weights: Sequence[float], recipe: MergeRecipe) -> Matrix:
    total, voters = _zero(kept), _zero(kept)
    if recipe.strategy == "dare_linear":
        for weight, values in zip(weights, kept, strict=True):
            total += np.float32(weight) * values
        return total
    elected = _elect(kept, recipe.majority_sign_method)
    for weight, values in zip(weights, kept, strict=True):
        agrees = np.sign(values) == elected
        total += np.float32(weight) * values * agrees
        voters += agrees
    total /= np.maximum(voters, np.float32(1))
    return total


def _elect(kept: Sequence[Matrix], method: SignMethod) -> Matrix:
    """1 or -1 for each value: the sign of the unweighted sum, or of the count of signs."""
    votes = (values if method == "total" else np.sign(values) for values in kept)
    return np.where(sum(votes, _zero(kept)) >= 0, np.float32(1), np.float32(-1))


def _zero(kept: Sequence[Matrix]) -> Matrix:
    return np.zeros_like(kept[0])


def _row_blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_VALUES // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
