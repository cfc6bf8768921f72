"""Rotary position embedding: inverse frequencies of every supported kind; cos and sin of positions;
the rotation.

Formulas and float32 rounding follow transformers' `modeling_rope_utils`, which published models are
trained with.
"""

import math
from collections.abc import Sequence

import torch

from loraplex.server.model.spec.model_spec import ModelSpec, RopeSpec


def inverse_frequencies(
    rope: RopeSpec, head_dim: int, device: torch.device | None = None, *, long: bool = False
) -> torch.Tensor:
    """Compute inverse frequencies, float32 `[rotary_dim / 2]`. long: by the factors of sequences
    beyond the original context.
    """
    dim = rope.rotary_dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    if rope.kind == "longrope":
        factors = rope.long_factors if long else rope.short_factors
        return 1.0 / (torch.tensor(factors, device=device) * rope.theta**exponents)
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "proportional":
        inv_freq[rope.turning :] = 0.0
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, dim)
    return inv_freq


def cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin: positions `[tokens]` or `[tokens, n]`, inv_freq `[n]` or `[tokens, n]`
    -> cos, sin, float32 `[tokens, 1, n]`, times `scale`.
    """
    wide = positions.to(torch.float32)
    angles = ((wide[:, None] if wide.dim() == 1 else wide) * inv_freq)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


class Sections:
    """Pairs of heads that turn by time, by height or by width."""

    def __init__(self, axes: Sequence[int], device: torch.device) -> None:
        """axes: as of PictureSpec."""
        self._of_pair = torch.tensor(axes, device=device)

    def positions(self, turns: torch.Tensor) -> torch.Tensor:
        """By what each pair of each token turns: `[3, tokens]` -> `[tokens, pairs]`."""
        return turns.index_select(0, self._of_pair).T


def sections_of(model: ModelSpec, device: torch.device) -> Sections | None:
    """The sections of a model whose pictures turn by three parts; None for others."""
    axes = None if model.pictures is None else model.pictures.axes
    return None if axes is None else Sections(axes, device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Rotate x `[tokens, heads, head_dim]`; cos, sin `[tokens, 1, rotary_dim / 2]`."""
    dim = 2 * cos.shape[-1]
    turning, rest = x[..., :dim].float(), x[..., dim:]
    if rope.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if rope.interleaved:
        rotated = torch.stack(turned, dim=-1).flatten(-2)
    else:
        rotated = torch.cat(turned, dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


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


def _yarn(rope: RopeSpec, inv_freq: torch.Tensor, dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions between the two regimes."""

    def dimension(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(dim // 2, dtype=torch.float32, device=inv_freq.device)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * (1 - kept) + inv_freq * kept
