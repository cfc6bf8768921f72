"""The generator: published vectors, uniformity, independence of its keys."""

import pytest
import torch

from loraplex.server.model.sampling.sampling import philox, uniform

# Known answers of Philox4x32-10, published with the authors' Random123: counter, key, result.
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert [int(w) for w in philox((c0, c1, c2, c3), (k0, k1))] == [int(w) for w in words(expected)]


def draws(seed: int, choice: int, count: int) -> torch.Tensor:
    index = torch.arange(count)
    return uniform(torch.full_like(index, seed), torch.full_like(index, choice), index)


def chi_square(values: torch.Tensor, bins: int) -> float:
    counts = torch.histc(values.double(), bins=bins, min=0.0, max=1.0)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345])
def test_uniform_over_indices(seed: int) -> None:
    # 99.99 % quantile of chi-square with 255 degrees of freedom: 347.
    assert chi_square(draws(seed, 0, 100_000), 256) < 347


def test_uniform_over_seeds_and_choices() -> None:
    seeds = torch.arange(100_000)
    zero = torch.zeros_like(seeds)
    assert chi_square(uniform(seeds, zero, zero), 256) < 347
    assert chi_square(uniform(zero, seeds, zero), 256) < 347


def test_neighbours_are_uncorrelated() -> None:
    a, b, c = draws(7, 0, 50_000), draws(8, 0, 50_000), draws(7, 1, 50_000)
    for other in (b, c, a.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack((a, other)))[0, 1])) < 0.02


def test_open_interval_and_all_64_seed_bits() -> None:
    values = draws(3, 0, 100_000)
    assert float(values.min()) > 0
    assert float(values.max()) < 1
    seeds = torch.tensor([1 << bit for bit in range(63)] + [-(1 << 63), 0])
    zero = torch.zeros_like(seeds)
    assert len(set(uniform(seeds, zero, zero).tolist())) == len(seeds)
