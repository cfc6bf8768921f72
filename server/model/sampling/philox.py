"""A counter-based random generator: a number is a function of (seed, choice, index) alone.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised in
int64 tensors that hold 32-bit words. No state: rows, batches and restarts cannot change a draw.
"""

import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Four 32-bit words per element; all tensors int64 of one shape, values in 0 .. 2^32-1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, choice: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """float64 in (0, 1), 52 bits fine. Arguments: int64 of one shape; seed is the 64-bit key."""
    zero = torch.zeros_like(index)
    counter = (index & _WORD, choice & _WORD, zero, zero)
    first, second, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    bits = (first << 20) | (second >> 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of a 32 x 32 bit product, in halves so that no int64 overflows."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
