"""What an adapter adds to a module's weight, and the nearest product of a small rank. Pure."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
# Of one matrix: 2 GiB as float64.
MAX_VALUES = 1 << 28


class WeightChange(NamedTuple):
    """`left @ right`, or `left` alone where `right` is None: `[outputs, inputs]`.

    left: `[outputs, k]`. right: `[k, inputs]`. bias: `[outputs]`, added to the outputs.
    """

    left: Matrix
    right: Matrix | None = None
    bias: Matrix | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.left), (self.left if self.right is None else self.right).shape[1]


class NearestProduct(NamedTuple):
    """b: `[outputs, rank]`, a: `[rank, inputs]`, float32. bias: as of WeightChange.

    norm: of the whole change, Frobenius. lost: of what `b @ a` leaves out.
    """

    b: npt.NDArray[np.float32]
    a: npt.NDArray[np.float32]
    bias: Matrix | None
    norm: float
    lost: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.lost / self.norm if self.norm else 0.0


def approximate(delta: WeightChange, max_rank: int, max_error: float) -> NearestProduct:
    """The lowest rank, at most `max_rank`, that loses at most `max_error` of the norm.

    Where no such rank is low enough, the best of `max_rank`. Singular values are split evenly.
    """
    left, values, right = decompose(delta)
    norm = float(np.linalg.norm(values))
    # lost[r]: with the first r values.
    lost = np.sqrt(np.append(np.cumsum(values[::-1] ** 2)[::-1], 0.0))
    enough = int(np.argmax(lost <= max_error * norm))
    rank = min(max(enough, 1), max_rank, len(values))
    roots = np.sqrt(values[:rank])
    return NearestProduct(
        _single(left[:, :rank] * roots),
        _single(roots[:, None] * right[:rank]),
        delta.bias,
        norm,
        float(lost[rank]),
    )


def decompose(delta: WeightChange) -> tuple[Matrix, Matrix, Matrix]:
    """Singular vectors and values, the largest first; at least one."""
    if delta.right is None:
        return _of_whole(delta.left)
    width = delta.left.shape[1]
    if width >= min(delta.shape):
        return _of_whole(delta.left @ delta.right)
    if not width:
        return np.zeros((delta.shape[0], 1)), np.zeros(1), np.zeros((1, delta.shape[1]))
    left, left_rest = np.linalg.qr(delta.left)
    right, right_rest = np.linalg.qr(delta.right.T)
    inner_left, values, inner_right = np.linalg.svd(left_rest @ right_rest.T)
    return left @ inner_left, values, inner_right @ right.T


def _of_whole(matrix: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """By the eigenvectors of the smaller side's Gram matrix, which takes a fraction of the time of
    a decomposition of the matrix. Values below 1e-8 of the largest are not exact."""
    if matrix.shape[0] > matrix.shape[1]:
        left, values, right = _of_whole(np.ascontiguousarray(matrix.T))
        return right.T, values, left.T
    squares, vectors = np.linalg.eigh(matrix @ matrix.T)
    values, left = np.sqrt(np.maximum(squares[::-1], 0.0)), vectors[:, ::-1]
    scale = np.where(values > 0, values, 1.0)
    return left, values, (left.T @ matrix) / scale[:, None]


def _single(matrix: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(matrix, np.float32)
