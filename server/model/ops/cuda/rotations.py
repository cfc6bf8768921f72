"""Tables by which a GPU's kernels turn queries and keys, and which of their rows a step reads."""

import torch

from loraplex.server.kernels.attention.rope_append import Rotation
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.rope import cos_sin, inverse_frequencies, sections_of
from loraplex.server.model.spec.model_spec import ModelSpec, PositionScale, RopeSpec


class Rotations:
    """Layers that rotate alike share their tables. Where the model has long factors, every table
    has them below, from row `max_context` on. Where it reads pictures, rows of `max_tokens` tokens
    of a step are below, which `turns` writes."""

    def __init__(
        self, model: ModelSpec, max_context: int, max_tokens: int, device: torch.device
    ) -> None:
        self._positions = torch.arange(max_context, device=device)
        self._first_long = None if model.short_context is None else max_context
        self._sections = sections_of(model, device)
        self._of_step = 0 if self._sections is None else max_tokens
        attentions = model.attentions.items()
        kinds = {layer: (of.head_dim, of.rope, of.q_scale) for layer, of in attentions}
        made = {kind: self._rotation(*kind) for kind in set(kinds.values())}
        self._by_layer = {layer: made[kind] for layer, kind in kinds.items()}
        self._turned = [
            (rope, inverse_frequencies(rope, head_dim, device), rotation)
            for (head_dim, rope, _), rotation in made.items()
            if rope is not None
        ]

    def __getitem__(self, layer: int) -> Rotation:
        return self._by_layer[layer]

    @property
    def has_turns(self) -> bool:
        """Whether rows of the tables may be others than positions."""
        return self._first_long is not None or self._sections is not None

    def shifts(
        self, long_rows: torch.Tensor, offsets: torch.Tensor | None
    ) -> tuple[torch.Tensor, int] | None:
        """For decodes: numbers of rows, int64 `[rows]`, and what they are multiplied with before
        they are added to a position; None = rows of the tables are positions. long_rows, offsets:
        as of `Rows`."""
        if self._first_long is not None:
            return long_rows, self._first_long
        return None if offsets is None else (offsets, 1)

    def turns(self, layout: StepLayout) -> torch.Tensor | None:
        """Rows of the tables, int64 `[tokens]`; None = the positions."""
        positions = layout.positions
        if self._first_long is not None:
            return positions + layout.long_rows[layout.token_rows] * self._first_long
        if self._sections is None:
            return None
        if layout.turns is None:
            return positions
        first, count = len(self._positions), len(positions)
        places = self._sections.positions(layout.turns)
        for rope, inv_freq, made in self._turned:
            made.cos_sin[first : first + count].copy_(_angles(places, inv_freq, rope))
        return torch.arange(first, first + count, device=positions.device)

    def _rotation(
        self, head_dim: int, rope: RopeSpec | None, q_scale: PositionScale | None
    ) -> Rotation:
        forms = (False,) if self._first_long is None else (False, True)
        tables = [self._cos_sin(head_dim, rope, long=long) for long in forms]
        tables.append(tables[0].new_zeros(self._of_step, tables[0].shape[1]))
        scale = None if q_scale is None else self._scale(q_scale).repeat(len(forms))
        return Rotation(torch.cat(tables), rope is not None and rope.interleaved, scale)

    def _cos_sin(self, head_dim: int, rope: RopeSpec | None, *, long: bool) -> torch.Tensor:
        """Compute a rotation's cos and sin of each position, float32 `[positions, 2 n]`."""
        if rope is None:
            return torch.empty(len(self._positions), 0, device=self._positions.device)
        long = long and bool(rope.long_factors)
        inv_freq = inverse_frequencies(rope, head_dim, self._positions.device, long=long)
        return _angles(self._positions, inv_freq, rope)

    def _scale(self, scale: PositionScale) -> torch.Tensor:
        """Compute the factor of queries at each position, float32 `[positions]`."""
        return 1.0 + scale.beta * (1.0 + self._positions // scale.context).log()


def _angles(places: torch.Tensor, inv_freq: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Compute cos and sin, float32 `[tokens, 2 n]`. places, inv_freq: as of `cos_sin`."""
    return torch.cat(cos_sin(places, inv_freq, rope.attention_factor), dim=-1).squeeze(1)
