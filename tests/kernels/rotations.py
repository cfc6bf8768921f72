"""Rotations and norms of q and k that kernels are tested with, and what they compute."""

from dataclasses import dataclass

import torch

from loraplex.server.kernels.attention.rope_append import QkNorm, Rotation


@dataclass(frozen=True)
class Turn:
    """pairs: that turn, as a part of those that a head has."""

    part: float = 1.0
    interleaved: bool = False
    scaled: bool = False

    def rotation(self, head_dim: int, positions: int, device: torch.device) -> Rotation:
        pairs = int(self.part * head_dim) // 2
        inv_freq = 100.0 ** -torch.linspace(0, 1, pairs)
        table = torch.arange(positions)[:, None] * inv_freq
        scale = (1 + 0.1 * torch.arange(positions)).to(device) if self.scaled else None
        cos_sin = torch.cat((table.cos(), table.sin()), dim=-1).to(device)
        return Rotation(cos_sin, self.interleaved, scale)


TURNS = {
    "halves": Turn(),
    "part": Turn(0.75),
    "neighbours": Turn(0.5, interleaved=True),
    "all neighbours": Turn(interleaved=True),
    "none": Turn(0.0),
    "scaled": Turn(0.5, scaled=True),
}


def normed(x: torch.Tensor, heads: int, norm: QkNorm | None) -> torch.Tensor:
    """x: `[tokens, heads + kv_heads, head_dim]`, q before k."""
    if norm is None:
        return x
    weights, parts = norm.weights.to(x), (x[:, :heads], x[:, heads:])
    dims = (1, 2) if norm.all_heads else (2,)
    factors = [torch.rsqrt(p.square().mean(dims, keepdim=True) + norm.epsilon) for p in parts]
    scaled = [part * factor for part, factor in zip(parts, factors, strict=True)]
    return torch.cat(scaled, dim=1) * weights


def rotated(
    x: torch.Tensor, heads: int, rotation: Rotation, positions: torch.Tensor
) -> torch.Tensor:
    """x as of `normed`, its features in their own order."""
    cos, sin = rotation.cos_sin.to(x)[positions][:, None].chunk(2, dim=-1)
    n, out = cos.shape[-1], x.clone()
    first = slice(0, 2 * n, 2) if rotation.interleaved else slice(0, n)
    second = slice(1, 2 * n, 2) if rotation.interleaved else slice(n, 2 * n)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    if rotation.q_scale is not None:
        out[:, :heads] *= rotation.q_scale.to(x)[positions][:, None, None]
    return out


def as_cached(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Features of q or k as kernels leave them: first features of pairs before second ones."""
    head_dim, turned = x.shape[-1], rotation.cos_sin.shape[1]
    if rotation.interleaved:
        order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    else:
        rest, n = (head_dim - turned) // 2, turned // 2
        order = [*range(n), *range(turned, turned + rest)]
        order += [*range(n, turned), *range(turned + rest, head_dim)]
    return x[..., order]
