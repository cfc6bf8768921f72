"""The seam between the decoder and the device: what a set of tensor operations must offer.

One decoder, several sets of ops: plain torch (ops_torch.py), and kernels for a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.linear.linear import Linear, MoeWeights
from loraplex.server.model.lora.sites import BranchSites, Site
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import Activation, AttentionSpec, ModelSpec
from loraplex.server.model.spec.page_groups import NO_PAGES, PageGroups
from loraplex.server.model.weight_source import StateWeights
from loraplex.server.model.weights import AttentionWeights, KvScales, Norm

# Of keys, and of values.
_Views = tuple[torch.Tensor, torch.Tensor]


class KVCache:
    """Keys and values of every layer, in pages of one size.

    pool: `[pages, 2 * page_size * groups.width]`. A page holds for each place of its group
    `page_size` keys `[kv_heads, head_dim]`, then as many values. groups: which layer has which
    place of which pages. dtype: of what is computed; the pool is of that, float8_e4m3fn or int8.
    scales: of each layer's keys and values in eight bits. token_scales: further ones of int8,
    float32 `[pages, 2 * page_size * page_heads(model)]`, for each place those of keys `[kv_heads,
    page_size]`, then those of values.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        model: ModelSpec,
        groups: PageGroups,
        page_size: int,
        dtype: torch.dtype,
        scales: tuple[KvScales, ...],
        token_scales: torch.Tensor | None = None,
    ) -> None:
        self.pool, self.groups, self.dtype = pool, groups, dtype
        self.all_scales = token_scales
        self.page_size = page_size
        keys_of = {layer: of.keys_of for layer, of in model.attentions.items()}
        readers = {layer: other for layer, other in keys_of.items() if other is not None}
        self.scales = tuple(scales[readers.get(layer, layer)] for layer in range(len(scales)))
        self._parts = {layer: of.parts for layer, of in model.attentions.items()}
        self._layers, self._token_scales = dict[int, _Views](), dict[int, _Views]()
        for layer, (group, place) in enumerate(groups.layers):
            if (group, place) == NO_PAGES:
                continue
            attention = model.layers[layer].attention
            self._layers[layer] = self._views(attention, place)
            if token_scales is not None:
                shape = (attention.num_kv_heads, page_size)
                self._token_scales[layer] = _keys_and_values(token_scales, place, shape)

    def _views(self, attention: AttentionSpec, place: int) -> _Views:
        shape = (self.page_size, attention.num_kv_heads, attention.head_dim)
        if isinstance(attention, LatentSpec):  # a key, whose first features are the value
            size = prod(shape)
            k = self.pool[:, place * size :][:, :size].unflatten(1, shape)
            return k, k[..., : attention.latent]
        return _keys_and_values(self.pool, place, shape)

    @property
    def is_rounded(self) -> bool:
        """Whether keys and values are kept in eight bits."""
        return self.pool.dtype != self.dtype

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of one layer, views `[pages, page_size, kv_heads, head_dim]`: from one page to
        the next are all numbers of a page, and a page's own lie together."""
        return self._layers[layer]

    def token_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of one layer's keys and of its values in int8, views float32 `[pages, kv_heads,
        page_size]`; None where the layer's keys are not in int8."""
        return self._token_scales.get(layer)

    def clear(self, layer: int, pages: torch.Tensor) -> None:
        """Set the layer's part of these pages to 0. pages: int64 `[n]`."""
        if pages.numel():
            for each in (*self.of(layer), *(self.token_scales(layer) or ())):
                _plain(each).index_fill_(0, pages, 0)

    def write(
        self,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Write keys and values of tokens, `[tokens, kv_heads, head_dim]`. pages, offsets: int64
        `[tokens]`, the page of each and the place in it.
        """
        token_scales = self.token_scales(layer)
        for i, (to, new) in enumerate(zip(self.of(layer), (k, v), strict=True)):
            if token_scales is not None:
                largest = new.float().abs().amax(-1, keepdim=True)
                scales = torch.where(largest > 0, largest / 127, 1.0)
                token_scales[i][pages, :, offsets] = scales[..., 0] / self.scales[layer][i]
                new = (new.float() / scales).round().to(to.dtype)
            elif self.is_rounded:
                most = torch.finfo(to.dtype).max
                new = _plain((new / self.scales[layer][i]).clamp(-most, most).to(to.dtype))
            _plain(to)[pages, offsets] = new

    def parts(self, layer: int) -> int:
        """Parts of the layer's product, as of `AttentionSpec.parts`."""
        return self._parts[layer]

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read keys and values of these pages, `[n, p]`: `[n, kv_heads, p * page_size, head_dim]`
        each, in the dtype of what is computed.
        """
        found, token_scales = [], self.token_scales(layer)
        for i, kept in enumerate(self.of(layer)):
            numbers = _gather(_plain(kept), pages)
            if token_scales is not None:
                scales = _gather(token_scales[i].transpose(1, 2)[..., None], pages)
                numbers = (numbers * scales * self.scales[layer][i]).to(self.dtype)
            elif self.is_rounded:
                numbers = numbers.view(kept.dtype).to(self.dtype) * self.scales[layer][i]
            found.append(numbers)
        return found[0], found[1]


def _keys_and_values(pool: torch.Tensor, place: int, shape: tuple[int, ...]) -> _Views:
    """Views of what a page has at a place for keys, and behind it for values. pool: `[pages, n]` ->
    each `[pages, *shape]`.
    """
    size = prod(shape)
    k, v = pool[:, 2 * place * size :][:, : 2 * size].split(size, dim=1)
    return k.unflatten(1, shape), v.unflatten(1, shape)


def _plain(pages: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: few operations know the type."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def _gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Gather pages of a cache: `[all pages, page_size, kv_heads, head_dim]`, `[n, p]` -> `[n,
    kv_heads, p * page_size, head_dim]`.
    """
    found = cache.index_select(0, pages.flatten())
    return found.view(len(pages), -1, *cache.shape[2:]).transpose(1, 2)


def _no_saves() -> np.ndarray:
    return np.zeros((0, 3), dtype=np.int64)


class DistanceProduct(NamedTuple):
    """Makes queries and keys of distances, or those that a layer has of both. table: `[rows,
    size]`, as of `ModelWeights.distances`. linear, site: of the layer; further outputs behind
    these mean nothing."""

    table: torch.Tensor
    linear: Linear
    site: Site


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Assignment of a flat batch's tokens to sequences.

    Slices come in the order of the batch. num_decodes: how many of them, the first ones, are one
    token each and computed as decodes: decode slices, prompt slices of one token, and padding.
    seq_rows, starts, num_new: int64 `[slices]`, on the host: the slice computes tokens `start ..
    start + num_new`. token_rows, positions: int64 `[tokens]`, on the device. page_table: int64
    `[groups, rows, pages a row]`, on the device; entries beyond a sequence's own pages, and those
    behind a group's window of the first token, are stale and must not be followed. long_rows: int64
    `[rows]`, on the device: 1 = the row's sequence takes its rotation's long factors
    (`ModelSpec.short_context`), else 0. saves: int64 `[n, 3]`, on the host, sorted: a slice, a
    position within it, and the snapshot of the states that the tokens before the position leave.
    replays: int64 `[slices]`, on the host: tokens of its row's last draft that a state takes first;
    None = no slice has any. turns: int64 `[3, tokens]`, on the device: where tokens lie by time, by
    height and by width, which turn pairs of their heads (`PictureSpec.axes`); None = all
    three are the positions. lasts: int64 `[tokens]`, on the host: the last token that each sees in
    layers that join pictures (`AttentionSpec.joins_pictures`); None = all see none behind them.
    """

    num_decodes: int
    seq_rows: np.ndarray
    starts: np.ndarray
    num_new: np.ndarray
    token_rows: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    long_rows: torch.Tensor
    saves: np.ndarray = field(default_factory=_no_saves)
    replays: np.ndarray | None = None
    turns: torch.Tensor | None = None
    lasts: np.ndarray | None = None

    def as_prompts(self) -> "StepLayout":
        """The same slices, of which none is computed as a decode."""
        return replace(self, num_decodes=0)

    @property
    def prompts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """seq_rows, starts and num_new of the slices behind the decodes."""
        n = self.num_decodes
        return self.seq_rows[n:], self.starts[n:], self.num_new[n:]

    def of(self, tokens: np.ndarray) -> "StepLayout":
        """Lay out some tokens alone, once the keys and values of all are written. tokens: int64
        `[n]`, in any order, of the batch. Neighbours of one slice are a slice; a slice of one token
        that sees none behind it is a decode where all before it are.
        """
        ends = np.cumsum(self.num_new)
        slices = np.searchsorted(ends, tokens, side="right")
        follows = (np.diff(tokens) == 1) & (np.diff(slices) == 0)
        begins = np.flatnonzero(np.append(True, ~follows))
        num_new = np.diff(np.append(begins, len(tokens)))
        first, of = tokens[begins], slices[begins]
        starts = self.starts[of] + first - (ends - self.num_new)[of]
        is_prompt = num_new > 1
        if self.lasts is not None:
            is_prompt |= self.lasts[first] > starts
        places = to_device(tokens, self.positions.device)
        return replace(
            self,
            num_decodes=int(np.argmax(np.append(is_prompt, True))),
            seq_rows=self.seq_rows[of],
            starts=starts,
            num_new=num_new,
            token_rows=self.token_rows[places],
            positions=self.positions[places],
            saves=_no_saves(),
            replays=None,
            turns=None if self.turns is None else self.turns[:, places],
            lasts=None if self.lasts is None else self.lasts[tokens],
        )


class Positioned(Protocol):
    """A plan that knows its tokens' positions, int64 `[tokens]`."""

    @property
    def positions(self) -> torch.Tensor: ...


P = TypeVar("P")
L = TypeVar("L")
Y = TypeVar("Y")


class Ops(Protocol[P, L, Y]):
    """Operations that a decoder is made of. P: what `plan` prepares once a step for `attend` of
    every layer. L: the adapters of a batch's tokens. Y: a product `[tokens, out]`, whose LoRA
    the operation that takes it may have to finish.
    """

    def plan(self, layout: StepLayout) -> P: ...

    def lora(self, token_slots: np.ndarray) -> L | None:
        """Prepare the adapters of a batch's tokens. token_slots: int64 `[tokens]`, -1 = the base.
        None where no token has an adapter.
        """
        ...

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: L | None, site: Site
    ) -> torch.Tensor:
        """Embed token ids: `[tokens]` -> `[tokens, hidden]`, with the adapters' deltas."""
        ...

    def linear(self, x: torch.Tensor, linear: Linear, lora: L | None, site: Site) -> Y:
        """The product plus the adapters' deltas at `site`: `[tokens, in]` -> `[tokens, out]`.
        Used once, before the next product."""
        ...

    def logits(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: L | None,
        site: Site,
        out: torch.Tensor | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        """Compute logits: `linear` of the head, complete: `[rows, hidden]` -> `[rows, vocab]`, in
        `out` where that is given; or `[rows, width]`, with ids that adapters alone have.
        """
        ...

    def forbid_others(self, logits: torch.Tensor, lora: L, site: Site) -> None:
        """Make tokens improbable that an adapter's own table of the head does not have."""
        ...

    def reduce(self, y: Y) -> Y:
        """A product by input features, summed over the devices that share the model."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Norm over the last dimension, in float32."""
        ...

    def norm_own(
        self, normed: torch.Tensor, hidden: torch.Tensor, lora: L, place: int, norm: Norm
    ) -> None:
        """Norm hidden again, in normed, for tokens whose adapter has a weight or a bias of its own
        at the place (`norm_place`), where the base has this norm.
        """
        ...

    def add_norm(
        self,
        delta: Y,
        hidden: torch.Tensor,
        norm: Norm | None,
        post: Norm | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, sum), the sum being `kept * hidden + factor * post(delta)`; without
        norm the sum twice. factors: factor and kept. Both tensors may be overwritten."""
        ...

    def let_through(self, attended: torch.Tensor, gate: Y) -> torch.Tensor:
        """Multiply what attention gives, `[tokens, heads * head_dim]`, by the sigmoid of a gate of
        the same shape.
        """
        ...

    def attend(self, plan: P, layer: int, qkv: Y, weights: AttentionWeights) -> torch.Tensor:
        """Attention as the layer's AttentionSpec says: norm and rotate q and k, write k and v into
        their pages, and attend over the pages, causally: -> `[tokens, heads * head_dim]`.

        qkv `[tokens, (heads + 2 kv_heads) * head_dim]`, or of fewer parts (`AttentionSpec.parts`),
        may be overwritten; with gates it has twice the heads of q. weights: qk_norm and sinks are
        read; qk_norm may be of each token, `[tokens, heads + kv_heads, head_dim]`.
        """
        ...

    def attend_latents(
        self,
        plan: P,
        layer: int,
        products: tuple[Y, Y],
        weights: LatentWeights,
        lora: L | None,
        site: Site,
    ) -> torch.Tensor:
        """Attention as the layer's LatentSpec says: norm the latent, rotate q's part and the shared
        one, write them, and attend over latents: -> `[tokens, heads * value_dim]`.

        products: of `q_b`, `[tokens, heads * (nope + rope)]`, and of `kv_a`, `[tokens, latent +
        rope]`. lora, site: adapters of `kv_b`.
        """
        ...

    def attend_distances(
        self,
        plan: P,
        layer: int,
        qkv: torch.Tensor,
        vectors: DistanceProduct,
        lora: L | None,
    ) -> torch.Tensor:
        """Attention of whole texts, whose scores are those of tokens with each other and with the
        vectors of their distances: -> `[tokens, heads * head_dim]`.

        qkv: as of `attend`, complete. lora: of the tokens; what is made of vectors for a token has
        the token's adapter.
        """
        ...

    def mix_states(
        self, plan: P, layer: int, products: Sequence[Y], weights: StateWeights
    ) -> torch.Tensor:
        """Mix tokens by a state, between the products of a mixer, as `weights.spec` says: convolve,
        move each row's state on by its tokens, and gate what is read from it.

        products: `[tokens, out]` of all matrices but the last -> `[tokens, in]` of the last. A
        state is zero before a sequence's first token.
        """
        ...

    def gated(self, gate_up: Y, activation: Activation, factor: float = 1.0) -> torch.Tensor:
        """Apply the gated activation: `activation(factor * gate) * up` of `[tokens, 2 n]`, gate
        first -> `[tokens, n]`.
        """
        ...

    def activated(
        self,
        up: Y,
        activation: Activation,
        numbers: torch.Tensor | None,
        factors: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply an activation without gate: `[tokens, n]` -> `[tokens, n]`. numbers: of xIELU.
        factors: multiply the result, `[tokens, n]`; None = nothing does."""
        ...

    def scaled(self, y: Y, gate: Y) -> Y:
        """Multiply a branch's output `[tokens, hidden]` by the sigmoid of each token's gate,
        `[tokens, 1]`.
        """
        ...

    def plus(self, a: Y, b: Y) -> Y:
        """The sum of what two branches give, `[tokens, hidden]` each."""
        ...

    def complete(self, y: Y) -> torch.Tensor:
        """The product with its LoRA, `[tokens, out]`; of experts their sum."""
        ...

    def completed(self, y: torch.Tensor) -> Y:
        """Wrap a finished tensor for the operation that takes the product."""
        ...

    def moe(
        self,
        x: torch.Tensor,
        routed_by: torch.Tensor,
        weights: MoeWeights,
        lora: L | None,
        sites: BranchSites,
    ) -> Y:
        """The output of a layer's experts for normed rows, as `weights.spec` says.

        `[tokens, hidden]` -> `[tokens, hidden]`. routed_by: what the router reads, as large as x. A
        token's experts are summed in the order of their weights, so that the sum depends on nothing
        else of the batch. The adapters' deltas are those of each expert at the sites of gate_up and
        of down.
        """
        ...
