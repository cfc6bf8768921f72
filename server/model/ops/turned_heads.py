"""Heads of q, k and v as attention reads them, by torch: normed, rotated, scaled."""

from dataclasses import dataclass

import torch

from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.products_torch import rms_norm
from loraplex.server.model.ops.rope import cos_sin, inverse_frequencies, rotate, sections_of
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec, PositionScale, RopeSpec
from loraplex.server.model.weights import RmsNorm

# A rotation of heads of one size.
Turn = tuple[RopeSpec, int]


@dataclass(frozen=True, slots=True)
class StepTurns:
    """Rotations of a step's tokens. rope: cos and sin, `[tokens, 1, rotary_dim / 2]`, of each.
    q_scales: factors of queries, `[tokens, 1, 1]`.
    """

    rope: dict[Turn, tuple[torch.Tensor, torch.Tensor]]
    q_scales: dict[PositionScale, torch.Tensor]


class HeadTurns:
    """The rotations that a model's layers have."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        attentions = set(model.attentions.values())
        turns = {(a.rope, a.head_dim) for a in attentions if a.rope}
        self._inv_freq = {turn: self._inverse_frequencies(*turn) for turn in turns}
        self._q_scales = {a.q_scale for a in attentions if a.q_scale}
        self._sections = sections_of(model, device)

    def of(self, layout: StepLayout) -> StepTurns:
        """Compute the rotations of a step's tokens."""
        return StepTurns(
            rope={turn: self._turned(turn, layout) for turn in self._inv_freq},
            q_scales={scale: self._q_scale(scale, layout) for scale in self._q_scales},
        )

    def _inverse_frequencies(self, rope: RopeSpec, head_dim: int) -> torch.Tensor:
        """Inverse frequencies: `[n]`, or `[2, n]` where sequences may be long."""
        forms = [False, True] if rope.long_factors else [False]
        found = [inverse_frequencies(rope, head_dim, self._device, long=long) for long in forms]
        return torch.stack(found) if len(found) > 1 else found[0]

    def _turned(self, turn: Turn, layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
        rope, inv_freq = turn[0], self._inv_freq[turn]
        if rope.long_factors:
            inv_freq = inv_freq[layout.long_rows[layout.token_rows]]
        positions = layout.positions
        if self._sections is not None and layout.turns is not None:
            positions = self._sections.positions(layout.turns)
        return cos_sin(positions, inv_freq, rope.attention_factor)

    def _q_scale(self, scale: PositionScale, layout: StepLayout) -> torch.Tensor:
        steps = 1.0 + layout.positions // scale.context
        factors = 1.0 + scale.beta * steps.log()
        return factors.to(self._dtype)[:, None, None]


def turned_heads(
    spec: AttentionSpec, qkv: torch.Tensor, qk_norm: torch.Tensor | None, turns: StepTurns
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute q, k and v, `[tokens, heads, head_dim]` each; q and k normed and rotated. Of q alone
    k and v have no heads. qkv, qk_norm: as of `Ops.attend`.
    """
    num_heads = spec.num_heads
    heads = qkv.view(len(qkv), -1, spec.head_dim)
    kv_heads = 0 if spec.parts == 1 else spec.num_kv_heads
    qk: torch.Tensor
    qk, v = heads.split((num_heads + kv_heads, kv_heads), dim=1)
    if qk_norm is not None and not spec.norms_rotated:
        qk = normed_heads(spec, qk, qk_norm)
    if spec.rope is not None:
        qk = rotate(qk, *turns.rope[spec.rope, spec.head_dim], spec.rope)
    if qk_norm is not None and spec.norms_rotated:
        qk = normed_heads(spec, qk, qk_norm)
    q, k = qk[:, :num_heads], qk[:, num_heads:]
    return q if spec.q_scale is None else q * turns.q_scales[spec.q_scale], k, v


def normed_heads(spec: AttentionSpec, qk: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Norm q and k. qk `[tokens, heads + kv_heads, head_dim]`; weight: as of `Ops.attend`."""
    if not spec.norms_all_heads:
        return rms_norm(qk, RmsNorm(weight, spec.qk_epsilon))
    sizes = (spec.num_heads, spec.num_kv_heads)
    normed = [
        rms_norm(x.flatten(1), RmsNorm(w.flatten(-2), spec.qk_epsilon)).view_as(x)
        for x, w in zip(qk.split(sizes, dim=1), weight.split(sizes, dim=-2), strict=True)
    ]
    return torch.cat(normed, dim=1)
