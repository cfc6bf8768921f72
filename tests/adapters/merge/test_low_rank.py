"""Approximations by a small rank are as good as the best one, also where they are randomised."""

import numpy as np
import pytest

from loraplex.adapters.merge.job import EXACT_SIDE, Matrix, factorise

RANK = 12


def masked_low_rank(rows: int, columns: int, density: float) -> Matrix:
    """What DARE leaves: a low-rank matrix under noise as large as itself."""
    rng = np.random.default_rng(0)
    left = rng.standard_normal((rows, RANK)) * np.linspace(1, 0.1, RANK)
    delta = left @ rng.standard_normal((RANK, columns))
    return (delta * (rng.random((rows, columns)) < density) / density).astype(np.float32)


def noise(rows: int, columns: int) -> Matrix:
    """No gap in the spectrum at all: the hardest case."""
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize(
    "matrix",
    [
        masked_low_rank(520, 600, 1.0),
        masked_low_rank(520, 600, 0.5),
        masked_low_rank(600, 520, 0.1),
        noise(540, 520),
    ],
    ids=["exact rank", "half dropped", "most dropped", "noise"],
)
def test_a_randomised_factorisation_is_nearly_the_best(matrix: Matrix) -> None:
    assert min(matrix.shape) > EXACT_SIDE
    b, a = factorise(matrix, RANK, seed=7)
    assert (b.shape, a.shape) == ((len(matrix), RANK), (RANK, matrix.shape[1]))
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    best = np.sqrt((values[RANK:] ** 2).sum())
    error = np.linalg.norm(matrix - b.astype(np.float64) @ a)
    assert error <= 1.002 * best + 1e-5 * values[0]


def test_below_the_limit_it_is_exact() -> None:
    matrix = noise(80, 300)
    b, a = factorise(matrix, 80, seed=0)
    np.testing.assert_allclose(b @ a, matrix, atol=1e-4)
    b, a = factorise(matrix, RANK, seed=0)
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    best = left[:, :RANK] * values[:RANK] @ right[:RANK]
    np.testing.assert_allclose(b @ a, best, atol=1e-3)


def test_the_seed_decides() -> None:
    matrix = noise(520, 520)
    first, again, other = (factorise(matrix, 4, seed)[0] for seed in (1, 1, 2))
    assert (first == again).all()
    assert not (first == other).all()


def test_a_matrix_of_zeros_has_factors() -> None:
    for rows in (20, EXACT_SIDE + 1):
        b, a = factorise(np.zeros((rows, 520), np.float32), 3, seed=0)
        assert not (b @ a).any()
        assert np.isfinite(a).all()
