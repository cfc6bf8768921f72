"""The best approximation of a matrix by one of a small rank."""

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

# Up to this side LAPACK's full decomposition is fast enough.
EXACT_SIDE = 512
_OVERSAMPLING = 8
_POWERS = 3


def factorise(matrix: Matrix, rank: int, seed: int) -> tuple[Matrix, Matrix]:
    """B `[rows, rank]` and A `[rank, columns]` such that B A is closest to `matrix`.

    Exact where a side has at most `EXACT_SIDE` values. Beyond, a randomised block Krylov method
    (Musco and Musco, NeurIPS 2015, algorithm 2) starts from a matrix drawn from `seed`. Its error
    is within a fraction of a percent of the best approximation's. Singular values are split evenly.
    """
    if min(matrix.shape) <= EXACT_SIDE:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    else:
        basis = _krylov_basis(matrix, rank + _OVERSAMPLING, seed)
        left, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ left
    roots = np.sqrt(values[:rank])
    return left[:, :rank] * roots, roots[:, None] * right[:rank]


def _krylov_basis(matrix: Matrix, width: int, seed: int) -> Matrix:
    """Orthonormal columns that span `(M M^T)^q M G` for q = 0 .. `_POWERS` and a random G."""
    rng = np.random.default_rng(seed)
    start = rng.standard_normal((matrix.shape[1], width), dtype=np.float32)
    block = _orthonormal(matrix @ start)
    blocks = [block]
    for _ in range(_POWERS):
        block = _orthonormal(matrix @ _orthonormal(matrix.T @ block))
        blocks.append(block)
    return _orthonormal(np.concatenate(blocks, axis=1))


def _orthonormal(columns: Matrix) -> Matrix:
    return np.linalg.qr(columns)[0]
