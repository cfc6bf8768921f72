"""An encoder of pictures: from a picture's patches to what stands in place of its tokens.

It runs a few layers at a time, so that steps come in between.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from loraplex.server.model.decoder import Decoder, Stream
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.sites import Sites
from loraplex.server.model.ops.pointwise import activated
from loraplex.server.model.spec.picture_spec import PictureSpec
from loraplex.server.model.tower.tower_ops import TowerOps, TowerPlan
from loraplex.server.model.weights import TowerWeights
from loraplex.server.protocol import Grid


@dataclass(slots=True)
class TowerPass:
    """One picture on its way through the layers. normed: what the next layer reads, `[rows,
    hidden]` of patches and what stands before them. deep: results of deep mergers, `[tokens, hidden
    of the text part]`. done: layers behind it.
    """

    plan: TowerPlan
    normed: torch.Tensor
    stream: Stream
    deep: list[torch.Tensor] = field(default_factory=list)
    done: int = 0


class Tower:
    """The encoder, whole on this device."""

    def __init__(self, pictures: PictureSpec, weights: TowerWeights, device: torch.device) -> None:
        self._spec, self._weights = pictures, weights
        self._ops = TowerOps(pictures, device)
        ops: Any = self._ops  # it has what the tower's layers ask for
        tower = pictures.tower
        self._decoder: Decoder[TowerPlan, Any, Any] = Decoder(
            tower, weights.body, Sites(tower), ops
        )

    @property
    def num_layers(self) -> int:
        return len(self._decoder.mixers)

    def begin(self, patches: torch.Tensor, grid: Grid) -> TowerPass:
        """Embed a picture's patches, `[patches, columns]` in the model's dtype."""
        body = self._weights.body
        hidden = torch.nn.functional.linear(patches, body.embed, self._weights.bias)
        beside = body.embedding
        tile = self._spec.form.tile
        if beside.positions is not None and not tile:
            hidden = hidden + self._ops.between(beside.positions, grid).to(hidden.dtype)
        elif beside.positions is not None:
            by_tile = hidden.unflatten(0, (-1, tile**2))
            before = len(beside.positions) - tile**2
            padded = torch.nn.functional.pad(by_tile, (0, 0, before, 0))
            hidden = (padded + beside.positions).flatten(0, 1)
        if beside.norm is not None:
            hidden = self._ops.norm(hidden, beside.norm)
        normed, stream = self._decoder.enter(hidden, None, None)
        return TowerPass(self._ops.plan(grid), normed, stream)

    def advance(self, picture: TowerPass, layers: int) -> None:
        """Compute so many further layers, or those that are left."""
        for number in range(picture.done, min(picture.done + layers, self.num_layers)):
            mixer = self._decoder.mixers[number]
            qkv = self._ops.linear(picture.normed, mixer.weights.linears[0], None, mixer.sites[0])
            mixed = self._decoder.mix(picture.plan, number, [qkv])
            picture.normed, picture.stream = self._decoder.after_mixer(
                number, mixed, picture.stream, None
            )
            picture.done = number + 1
            deep = self._weights.deep.get(number)
            if deep is not None:
                normed = self._ops.norm(self._by_token(picture.stream.hidden), deep.norm)
                picture.deep.append(self._merged(normed, deep.first, deep.last))

    def tokens(self, picture: TowerPass) -> torch.Tensor:
        """Make results of a picture behind all layers: `[tokens, PictureSpec.result_size]`."""
        merger, last = self._spec.merger, self._weights.body.lm_head
        found = picture.stream.hidden if merger.reads_stream else picture.normed
        by_token = self._by_token(found[merger.skipped :])
        if self._weights.joined is not None:
            by_feature = by_token.unflatten(1, (merger.side**2, -1)).transpose(1, 2)
            by_token = self._weights.joined.run(by_feature.flatten(1))
        result = self._merged(by_token, self._weights.first, last)
        return torch.cat((result, *picture.deep), dim=1)

    def _by_token(self, patches: torch.Tensor) -> torch.Tensor:
        merger = self._spec.merger
        return patches.reshape(-1, (merger.joined or merger.first).in_features)

    def _merged(self, patches: torch.Tensor, first: Linear, last: Linear) -> torch.Tensor:
        """patches: `[tokens, features]`, as the first product takes them."""
        return last.run(activated(first.run(patches), self._spec.merger.activation))
