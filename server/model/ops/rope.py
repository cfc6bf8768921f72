"""Rotary position embedding: inverse frequencies of every supported kind; cos and sin of positions.

Formulas and float32 rounding follow transformers' `modeling_rope_utils`, which published models are
trained with. Heads are rotated in halves (`x[i]` with `x[i + head_dim / 2]`).
"""

import math

import torch

from server.model.spec import RopeSpec


def inverse_frequencies(
    rope: RopeSpec, head_dim: int, device: torch.device | None = None
) -> torch.Tensor:
    """float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions `[tokens]` -> cos, sin, float32 `[tokens, 1, head_dim / 2]`, times `scale`."""
    angles = (positions.to(torch.float32)[:, None] * inv_freq)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def _llama3(rope: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / inv_freq
    low_wavelength = rope.original_context / rope.low_freq_factor
    high_wavelength = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    stretched = torch.where(wavelengths > low_wavelength, inv_freq / rope.factor, between)
    return torch.where(wavelengths < high_wavelength, inv_freq, stretched)


def _yarn(rope: RopeSpec, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions between the two regimes."""

    def dimension(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device=inv_freq.device)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * (1 - kept) + inv_freq * kept
