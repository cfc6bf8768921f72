"""Operations of devices that share the model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from loraplex.adapters.base import heads_of, new_ids_width, tokens_of_shard
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.model.devices.group import DeviceSum, Group
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.own_rows import OwnSegment, has_new_ids
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.ops import Ops, StepLayout
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec
from loraplex.server.model.weight_source import StateWeights
from loraplex.server.model.weights import AttentionWeights


class _WithOwn(Protocol):
    """Adapters of a batch. own: those with rows of their own."""

    @property
    def own(self) -> tuple[OwnSegment, ...]: ...


P = TypeVar("P")
L = TypeVar("L", bound=_WithOwn)
Y = TypeVar("Y")


class ShardedOps(Ops[P, L, Y], Protocol[P, L, Y]):
    """Ops of one device's part."""

    def linear(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: L | None,
        site: Site,
        out: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> Y:
        """Compute a product with LoRA, as `Ops.linear` does. out, delta: where the output is to
        lie, and what LoRA adds later, if it does; `[tokens, out]`; None: anywhere.
        """
        ...

    def with_terms(self, y: Y, terms: SharedTerms) -> Y:
        """y, which lies there, for an operation that can sum it itself."""
        ...

    def reduce(self, y: Y, over_devices: DeviceSum | None = None) -> Y:
        """Sum the devices' parts of a product by over_devices, as `Ops.reduce` does, unless the
        operation that takes y sums it.
        """
        ...

    def mix_states(
        self,
        plan: P,
        layer: int,
        products: Sequence[Y],
        weights: StateWeights,
        over_devices: DeviceSum | None = None,
    ) -> torch.Tensor:
        """Mix tokens as `Ops.mix_states` does. over_devices: sums what devices norm together."""
        ...


class GroupOps(Generic[P, L, Y]):
    """Implements `Ops` by those of one device's part, and what all devices compute together."""

    def __init__(self, whole: ModelSpec, ops: ShardedOps[P, L, Y], group: Group) -> None:
        self._whole, self._ops, self._group = whole, ops, group
        self.plan: Callable[[StepLayout], P] = ops.plan
        self.lora: Callable[[np.ndarray], L | None] = ops.lora
        self.gated, self.activated, self.moe = ops.gated, ops.activated, ops.moe
        self.let_through, self.attend_latents = ops.let_through, ops.attend_latents
        self.attend_distances = ops.attend_distances
        self.plus, self.scaled = ops.plus, ops.scaled
        self.complete, self.completed = ops.complete, ops.completed
        self.norm, self.add_norm, self.norm_own = ops.norm, ops.add_norm, ops.norm_own

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: L | None, site: Site
    ) -> torch.Tensor:
        """Embed ids. Ids of other devices give zeros, to which those devices add their rows."""
        width, vocab = len(weight), self._whole.vocab_size
        ids = token_ids - self._group.shard.index * width
        mine = (ids >= 0) & (ids < width)
        if lora is not None and has_new_ids(lora.own, site.number, vocab):
            _, new = tokens_of_shard(vocab, self._group.shard)
            is_new = (token_ids >= new.source.start) & (token_ids < new.source.stop)
            mine = (mine & (token_ids < vocab)) | is_new
            ids = torch.where(is_new, token_ids + (new.target.start - new.source.start), ids)
        found = self._ops.embed(torch.where(mine, ids, 0), weight, lora, site)
        return self._group.sum(found * mine.unsqueeze(1))

    def linear(self, x: torch.Tensor, linear: Linear, lora: L | None, site: Site) -> Y:
        if site.turn is None:
            return self._ops.linear(x, linear, lora, site)
        terms = self._group.terms(len(x), site.turn)
        if terms is None:
            return self._ops.linear(x, linear, lora, site, self._group.place(len(x)))
        y = self._ops.linear(x, linear, lora, site, terms.y, terms.delta)
        return self._ops.with_terms(y, terms)

    def reduce(self, y: Y) -> Y:
        return self._ops.reduce(y, self._group.sum)

    def logits(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: L | None,
        site: Site,
        out: torch.Tensor | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        """Compute logits, and gather them from all devices. width: of the base's ids, and of new
        ones, which are gathered apart.
        """
        vocab, group = self._whole.vocab_size, self._group
        if width is None:
            own = self._ops.logits(x, linear, lora, site)
            return group.gather(own, own.new_empty(len(own), vocab) if out is None else out)
        base = linear.out_features
        own_width = base + new_ids_width(group.shard.count)
        own = self._ops.logits(x, linear, lora, site, width=own_width)
        wide = own.new_empty(len(own), width)
        group.gather(own[:, :base], wide[:, :vocab])
        group.gather(own[:, base:], wide[:, vocab:])
        return wide

    def forbid_others(self, logits: torch.Tensor, lora: L, site: Site) -> None:
        self._ops.forbid_others(logits, lora, site)

    def attend(self, plan: P, layer: int, qkv: Y, weights: AttentionWeights) -> torch.Tensor:
        spec, qk_norm = self._whole.layers[layer].attention, weights.qk_norm
        if qk_norm is not None and spec.norms_all_heads:
            qkv = self._ops.completed(self._normed(spec, self._ops.complete(qkv), qk_norm))
            weights = replace(weights, qk_norm=None)
        return self._ops.attend(plan, layer, qkv, weights)

    def mix_states(
        self, plan: P, layer: int, products: Sequence[Y], weights: StateWeights
    ) -> torch.Tensor:
        return self._ops.mix_states(plan, layer, products, weights, self._group.sum)

    def _normed(self, spec: AttentionSpec, qkv: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Norm q and k over the heads of all devices, in place. Returns qkv."""
        shard = self._group.shard
        of_each = (heads_of(count, shard) for count in (spec.num_heads, spec.num_kv_heads))
        sizes = [mine.stop - mine.start for mine in of_each]
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        q, k, _ = (each.float() for each in heads.split([*sizes, sizes[1]], dim=1))
        squares = torch.stack([q.square().sum((1, 2)), k.square().sum((1, 2))])
        sums = self._group.sum(squares)
        sums[1] /= max(1, shard.count // spec.num_kv_heads)  # devices that have the same keys
        places = heads.split([*sizes, sizes[1]], dim=1)
        of_all = zip(
            (q, k), weight.split(sizes, dim=-2), sums, (spec.q_size, spec.kv_size), strict=True
        )
        for place, (x, w, squared, size) in zip(places, of_all, strict=False):
            factor = torch.rsqrt(squared / size + spec.qk_epsilon)[:, None, None]
            place.copy_(w * (x * factor).to(w.dtype))
        return qkv
