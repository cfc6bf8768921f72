"""How each layer rotates q and k, as tables of all positions on the device."""

import torch

from loraplex.server.kernels.attention.rotation import Rotation
from loraplex.server.model.ops.rope import cos_sin, inverse_frequencies
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec, PositionScale, RopeSpec


class Rotations:
    """Layers that rotate alike share their tables. Where the model has long factors, every table
    has them below, from row `max_context` on."""

    def __init__(self, model: ModelSpec, max_context: int, device: torch.device) -> None:
        self._positions = torch.arange(max_context, device=device)
        self._first_long = None if model.short_context is None else max_context
        kinds = {_kind(layer.attention) for layer in model.layers}
        made = {kind: self._rotation(model.head_dim, *kind) for kind in kinds}
        self._by_layer = tuple(made[_kind(layer.attention)] for layer in model.layers)

    def __getitem__(self, layer: int) -> Rotation:
        return self._by_layer[layer]

    @property
    def has_long(self) -> bool:
        """Whether rows of the tables may be others than positions."""
        return self._first_long is not None

    def turns(
        self, positions: torch.Tensor, rows: torch.Tensor, long_rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Rows of the tables, int64 `[tokens]`; None = the positions. positions, rows: of tokens;
        long_rows: see `StepLayout`."""
        if self._first_long is None:
            return None
        return positions + long_rows[rows] * self._first_long

    def _rotation(
        self, head_dim: int, rope: RopeSpec | None, q_scale: PositionScale | None
    ) -> Rotation:
        forms = (False,) if self._first_long is None else (False, True)
        cos_sin = torch.cat([self._cos_sin(head_dim, rope, long=long) for long in forms])
        scale = None if q_scale is None else self._scale(q_scale).repeat(len(forms))
        return Rotation(cos_sin, rope is not None and rope.interleaved, scale)

    def _cos_sin(self, head_dim: int, rope: RopeSpec | None, *, long: bool) -> torch.Tensor:
        """float32 `[positions, 2 n]`."""
        positions = self._positions
        if rope is None:
            return torch.empty(len(positions), 0, device=positions.device)
        long = long and bool(rope.long_factors)
        inv_freq = inverse_frequencies(rope, head_dim, positions.device, long=long)
        angles = cos_sin(positions, inv_freq, rope.attention_factor)
        return torch.cat(angles, dim=-1).squeeze(1)

    def _scale(self, scale: PositionScale) -> torch.Tensor:
        """float32 `[positions]`."""
        return 1.0 + scale.beta * (1.0 + self._positions // scale.context).log()


def _kind(attention: AttentionSpec) -> tuple[RopeSpec | None, PositionScale | None]:
    return attention.rope, attention.q_scale
