"""Operations of an encoder of pictures, in plain torch on every device."""

from dataclasses import dataclass
from math import isqrt

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.model.ops.products_torch import TorchProducts
from loraplex.server.model.ops.rope import cos_sin, inverse_frequencies
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.ops.turned_heads import StepTurns, Turn, turned_heads
from loraplex.server.model.spec.model_spec import AttentionSpec
from loraplex.server.model.spec.picture_spec import PictureSpec
from loraplex.server.model.tower.geometry import patch_places, table_taps, window_table
from loraplex.server.protocol import Grid


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one picture. patches: int64 `[windows, most]`; what fills up a window is any
    patch. seen: bool `[windows, 1, 1, most]`, False for that; None = every window is full. places:
    int64 `[patches]`, of each patch among all places of windows.
    """

    patches: torch.Tensor
    seen: torch.Tensor | None
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class TowerPlan:
    """Preparation of a picture's attention. positions: int64 `[patches]`, rows of the picture.
    windows: None = no layer has any."""

    positions: torch.Tensor
    turns: StepTurns
    windows: Windows | None


class TowerOps(TorchProducts):
    """Operations of one tower. Each patch sees those of its window, or all of its picture."""

    def __init__(self, pictures: PictureSpec, device: torch.device) -> None:
        self._spec, self._device = pictures, device

    def _attention(self, layer: int) -> AttentionSpec:
        return self._spec.tower.layers[layer].attention

    def plan(self, grid: Grid) -> TowerPlan:
        """Prepare the attention of one picture. grid: as of `patch_places`."""
        places = to_device(patch_places(grid, self._spec.merger.side), self._device)
        return TowerPlan(places[0], StepTurns(self._turned(places), {}), self._windows(grid))

    def _turned(self, places: torch.Tensor) -> dict[Turn, tuple[torch.Tensor, torch.Tensor]]:
        attention = self._attention(0)
        if attention.rope is None:
            return {}
        # Half of the pairs turn by the row, and half by the column.
        inv_freq = inverse_frequencies(attention.rope, attention.head_dim, self._device)
        of_axes = inv_freq[::2], inv_freq[int(self._spec.splits) :: 2]
        by_axis = [cos_sin(axis, own, 1.0) for axis, own in zip(places, of_axes, strict=True)]
        cos, sin = (torch.cat(both, dim=-1) for both in zip(*by_axis, strict=True))
        return {(attention.rope, attention.head_dim): (cos, sin)}

    def between(self, table: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Vectors of patches' places, float32 `[patches, hidden]`. table: `[positions, hidden]`."""
        taps = table_taps(grid, self._spec.merger.side, isqrt(len(table)))
        rows, factors = (to_device(each, self._device) for each in taps)
        found = table[rows[0]] * factors[0, :, None]
        for row, factor in zip(rows[1:], factors[1:], strict=True):
            found = found + table[row] * factor[:, None]
        return found

    def _windows(self, grid: Grid) -> Windows | None:
        if not self._spec.window:
            return None
        table = window_table(grid, self._spec.merger.side, self._spec.window)
        is_patch = table >= 0
        places = np.empty(int(is_patch.sum()), dtype=np.int64)
        places[table[is_patch]] = np.flatnonzero(is_patch)
        seen = None if is_patch.all() else to_device(is_patch[:, None, None], self._device)
        patches = to_device(np.maximum(table, 0), self._device)
        return Windows(patches, seen, to_device(places, self._device))

    def attend(
        self,
        plan: TowerPlan,
        layer: int,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend as `Ops.attend` does, to patches that see each other; nothing is kept."""
        spec = self._attention(layer)
        heads = turned_heads(spec, qkv, qk_norm, plan.turns)
        windows = plan.windows
        if spec.window is None or windows is None:
            q, k, v = (x.transpose(0, 1)[None] for x in heads)
            found = functional.scaled_dot_product_attention(q, k, v, scale=spec.scale)
            return found[0].transpose(0, 1).flatten(1)
        q, k, v = (x[windows.patches].transpose(1, 2) for x in heads)
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=windows.seen, scale=spec.scale
        )
        return found.transpose(1, 2).flatten(0, 1)[windows.places].flatten(1)
