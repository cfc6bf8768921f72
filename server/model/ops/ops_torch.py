"""The reference set of ops, in plain torch: correct on every device, and fast enough on a CPU.

Mixers that keep states go token by token, which is their definition: a step computes a token of
each of its slices at once, then the next of those that have one. So results do not depend on where
prompts are cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.kernels.states.operands import Convolution, GatedNorm
from loraplex.server.model.devices.group import DeviceSum
from loraplex.server.model.distance_biases import biases_within
from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.lora.lora import AdapterTable, LoraBatch
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.latents_torch import AbsorbedKeys, attend_distances
from loraplex.server.model.ops.ops import DistanceProduct, KVCache, StepLayout
from loraplex.server.model.ops.products_torch import TorchProducts, with_values, without_gate
from loraplex.server.model.ops.row_states import Move, RowStates, TokenSteps
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.ops.turned_heads import HeadTurns, StepTurns, turned_heads
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec
from loraplex.server.model.weight_source import RecurrentWeights, ShortConvWeights, StateWeights
from loraplex.server.model.weights import AttentionWeights

# Under the root of a key's and a query's squares.
_EPSILON = 1e-6

# Masks of layers, by their window.
Masks = dict[int | None, torch.Tensor | None]


def mix_states(
    moves: Iterable[Move],
    products: Sequence[torch.Tensor],
    weights: StateWeights,
    states: tuple[torch.Tensor, ...],
    over_devices: DeviceSum | None = None,
) -> torch.Tensor:
    """Compute as `Ops.mix_states` says. states: of the layer, which take the tokens; zeros where a
    sequence begins. over_devices: as of `ShardedOps.mix_states`."""
    conv, mixed = weights.conv, products[0]
    inputs = mixed[:, conv.columns]
    if conv.factors is not None:
        inputs = inputs * mixed[:, conv.factors[0]]
    if not isinstance(weights, ShortConvWeights):
        found = _recur(moves, inputs, products[-1], weights, states)
        z = products[-1 if weights.gates_z else 0][:, weights.z_columns]
        return gated_norm(found, z, weights.norm, over_devices)
    found = torch.empty_like(inputs)
    for tokens, rows in moves:
        found[tokens] = _convolve(inputs[tokens], conv, states[0], rows)
    return found if conv.factors is None else found * mixed[:, conv.factors[1]]


def _convolve(
    inputs: torch.Tensor, conv: Convolution, window: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Convolve a token of each row, but for factors: `[rows, channels]` -> the same."""
    seen = torch.cat((window[rows], inputs.unsqueeze(1)), dim=1)
    window[rows] = seen[:, 1:]
    summed = (seen.float() * conv.weight.T.float()).sum(1)
    if conv.bias is not None:
        summed = summed + conv.bias.float()
    return (functional.silu(summed) if conv.factors is None else summed).to(inputs.dtype)


def _recur(
    moves: Iterable[Move],
    inputs: torch.Tensor,
    product: torch.Tensor,
    weights: RecurrentWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute as `delta_rule` says, or `state_space`, of what is convolved: `[tokens, values *
    value_dim]`, the delta rule's of the inputs' dtype. product: which has the gates' inputs."""
    gates, (window, memory) = weights.gates, states
    is_delta, of_gates = weights.is_delta, product[:, gates.columns].float()
    b, a = of_gates.chunk(2, dim=1) if is_delta else (None, of_gates)
    dt = functional.softplus(a * gates.factor + gates.bias).clamp(*gates.limits)
    kept, taken = (gates.decay * dt).exp(), dt if b is None else b.sigmoid() * gates.beta
    dtype = inputs.dtype if is_delta else torch.float32
    found = inputs.new_empty(len(inputs), *memory.shape[1::2], dtype=dtype)
    for tokens, rows in moves:
        convolved = _convolve(inputs[tokens], weights.conv, window, rows)
        q, k, v = _heads(weights, convolved.float())
        state, news = memory[rows] * kept[tokens, :, None, None], v
        if is_delta:
            news = v - (state * k.unsqueeze(-1)).sum(-2)
        state += k.unsqueeze(-1) * (news * taken[tokens].unsqueeze(-1)).unsqueeze(-2)
        memory[rows] = state
        read = (state * q.unsqueeze(-1)).sum(-2)
        if gates.skip is not None:
            read = read + gates.skip.unsqueeze(-1) * v
        found[tokens] = read.to(dtype)
    return found.flatten(1)


def _heads(
    weights: RecurrentWeights, convolved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k of each head of v, and v. In the delta rule q and k have length 1, and q is divided
    by the root of its size.

    convolved: float32 `[n, channels]` -> `[n, values, key_dim]` twice, `[n, values, value_dim]`.
    """
    keys, values, key_dim, value_dim = weights.heads
    sizes = [keys * key_dim] * 2
    if weights.is_delta:
        q, k, v = convolved.split((*sizes, values * value_dim), dim=1)
    else:
        v, k, q = convolved.split((values * value_dim, *sizes), dim=1)
    qk = torch.stack((q, k)).unflatten(-1, (keys, key_dim))
    if weights.is_delta:
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + _EPSILON)
        qk[0] *= key_dim**-0.5
    q, k = qk.repeat_interleave(values // keys, dim=2)
    return q, k, v.unflatten(-1, (values, value_dim))


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm, over_devices: DeviceSum | None
) -> torch.Tensor:
    """Norm and gate as the kernel of that name says. x, gate: `[tokens, features]` -> the same, of
    gate's dtype. over_devices: sums over devices that norm together."""
    wide, gate, dtype = x.float(), functional.silu(gate.float() * norm.factor), gate.dtype
    if norm.gate_first:
        wide = wide * gate
    if norm.weight is not None:
        grouped = wide.unflatten(1, (-1, min(norm.size, wide.shape[1])))
        squares = grouped.square().sum(-1, keepdim=True)
        if norm.size > wide.shape[1] and over_devices is not None:
            squares = over_devices(squares)
        normed = grouped * torch.rsqrt(squares / norm.size + norm.epsilon)
        wide = norm.weight * normed.flatten(1).to(dtype)
    return wide.to(dtype) if norm.gate_first else (wide * gate).to(dtype)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context, padded to the longest of them.

    tokens: int64 `[n]`, their places in the batch. pages: `[groups, n, p]`. masks: by window, True
    = seen, `[n, 1, 1, p * page_size]`.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    masks: Masks


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Chunk of a prompt: tokens begin .. end of the batch, the last ones of a context of `context`
    tokens, unless they see some behind them. pages: `[groups, 1, p]`. masks: by window, `[end -
    begin, context]`, or None = plainly causal; with biases, what is added to scores, `[heads, 1,
    end - begin, context]`. joining: of layers that join pictures.
    """

    begin: int
    end: int
    context: int
    pages: torch.Tensor
    masks: Masks
    joining: Masks

    def mask(self, spec: AttentionSpec) -> torch.Tensor | None:
        return (self.joining if spec.joins_pictures else self.masks)[spec.window]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Preparation of a step's attention. pages, offsets: of each token's keys and values, int64
    `[groups, tokens]` and `[tokens]`. fresh_pages: `[groups, n]`, those whose first token is
    written in this step. positions: int64 `[tokens]`. states: None where the model has none.
    """

    positions: torch.Tensor
    turns: StepTurns
    pages: torch.Tensor
    offsets: torch.Tensor
    fresh_pages: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]
    states: TokenSteps | None = None


class OfHeads(NamedTuple):
    """Numbers of query heads, float32 `[heads]` at first, or None: sinks and slopes."""

    sinks: torch.Tensor | None
    slopes: torch.Tensor | None

    def grouped(self, queries: torch.Tensor) -> "OfHeads":
        """As `[kv_heads, group, 1]`. queries: `[tokens, kv_heads, group, head_dim]`."""
        shape = (*queries.shape[1:3], 1)
        return OfHeads(*(None if of is None else of.view(shape) for of in self))

    def of_each_query(self) -> "OfHeads":
        """As `[kv_heads, group, 1, 1]`, of what is grouped."""
        return OfHeads(*(None if of is None else of.unsqueeze(-1) for of in self))


NO_NUMBERS = OfHeads(None, None)


class TorchOps(TorchProducts):
    """Implements `loraplex.server.model.ops.ops.Ops` for any model, dtype and device."""

    def __init__(
        self,
        model: ModelSpec,
        cache: KVCache,
        table: AdapterTable,
        states: RowStates,
        biases: torch.Tensor | None = None,
    ) -> None:
        """Make the operations for one model. biases: as of ModelWeights."""
        self.model = model
        self.cache = cache
        self.states, self.biases = states, biases
        self.table = table
        self.windows = tuple(set(model.windows))
        self.device = cache.pool.device
        # `[groups, 1, 1]`
        windows = [model.max_context if w is None else w for w in cache.groups.windows]
        self._page_windows = torch.tensor(windows, device=self.device)[:, None, None]
        self._turns = HeadTurns(model, cache.dtype, self.device)
        found = {of.slopes for of in model.attentions.values() if of.slopes}
        self._slopes = {slopes: torch.tensor(slopes, device=self.device) for slopes in found}

    def lora(self, token_slots: np.ndarray) -> LoraBatch | None:
        return self.table.batch(token_slots)

    def plan(self, layout: StepLayout) -> TorchPlan:
        size = self.cache.page_size
        pages = layout.page_table[:, layout.token_rows, layout.positions // size]
        offsets = layout.positions % size
        decodes = layout.num_decodes if self.model.is_causal else 0
        return TorchPlan(
            positions=layout.positions,
            turns=self._turns.of(layout),
            pages=pages,
            offsets=offsets,
            fresh_pages=pages[:, offsets == 0],
            decodes=self._decode_groups(layout, decodes),
            chunks=self._chunks(layout, decodes),
            states=TokenSteps.of(layout, self.states.scratch, self.states.depth)
            if self.states
            else None,
        )

    def _decode_groups(self, layout: StepLayout, decodes: int) -> tuple[DecodeGroup, ...]:
        """Group by page count up to a power of two, so that padding at most doubles the work."""
        contexts = layout.starts[:decodes] + 1
        page_counts = -(-contexts // self.cache.page_size)
        classes = np.ceil(np.log2(page_counts)).astype(np.int64)
        groups = []
        for size_class in np.unique(classes):
            members = np.flatnonzero(classes == size_class)
            groups.append(self._decode_group(layout, members, contexts, page_counts))
        return tuple(groups)

    def _decode_group(
        self, layout: StepLayout, members: np.ndarray, contexts: np.ndarray, counts: np.ndarray
    ) -> DecodeGroup:
        width = int(counts[members].max())
        rows = self._tensor(layout.seq_rows[members])
        context = self._tensor(contexts[members])[:, None]
        table = layout.page_table[:, rows, :width]
        pages = self._own_pages(table, context - 1, self._tensor(counts[members])[:, None])
        seen = torch.arange(width * self.cache.page_size, device=self.device)
        masks: Masks = {}
        for window in self.windows:
            mask = seen < context
            if window is not None:
                mask = mask & (seen >= context - window)
            masks[window] = mask[:, None, None, :]
        return DecodeGroup(self._tensor(members), pages, masks)

    def _own_pages(
        self, table: torch.Tensor, position: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        """Put the last page in place of pages that are not a sequence's own: masked-out values
        still enter sums as 0 * value. table: `[groups, n, p]`; position, count: `[n, 1]`, the
        first token that attends, and pages.
        """
        place = torch.arange(table.shape[-1], device=self.device)
        first = (position - self._page_windows + 1).clamp(min=0) // self.cache.page_size
        last = table.gather(2, (count - 1).expand(len(table), -1, 1))
        return torch.where((place >= first) & (place < count), table, last)

    def _chunks(self, layout: StepLayout, decodes: int) -> tuple[PrefillChunk, ...]:
        chunks = []
        begin = decodes
        for i in range(decodes, len(layout.starts)):
            start, count = int(layout.starts[i]), int(layout.num_new[i])
            tokens = slice(begin, begin + count)
            context = start + count
            if layout.lasts is not None:
                context = max(context, int(layout.lasts[tokens].max()) + 1)
            width = -(-context // self.cache.page_size)
            masks, joining = self._chunk_masks(layout, tokens, start, context)
            row = int(layout.seq_rows[i])
            table = layout.page_table[:, row : row + 1, :width]
            of_row = (torch.tensor([[n]], device=self.device) for n in (start, width))
            pages = self._own_pages(table, *of_row)
            chunks.append(PrefillChunk(begin, begin + count, context, pages, masks, joining))
            begin += count
        return tuple(chunks)

    def _chunk_masks(
        self, layout: StepLayout, tokens: slice, start: int, context: int
    ) -> tuple[Masks, Masks]:
        """Masks of the layers, and of those that join pictures. tokens: of the batch."""
        of_chunk = start, tokens.stop - tokens.start, context
        masks = {window: self._chunk_mask(*of_chunk, window) for window in self.windows}
        if layout.lasts is None:
            return masks, masks
        lasts = self._tensor(layout.lasts[tokens])
        return masks, {
            window: self._chunk_mask(*of_chunk, window, lasts) for window in self.windows
        }

    def _chunk_mask(
        self,
        start: int,
        count: int,
        context: int,
        window: int | None,
        lasts: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if not self.model.is_causal:
            places = torch.arange(count, device=self.device)
            seen = (places - places[:, None]).abs() < (count if window is None else window)
            if self.biases is None:
                return seen
            biases = biases_within(self.biases, count).masked_fill(~seen, -torch.inf)
            return biases.to(self.cache.dtype)[:, None]
        if lasts is None and context == count and (window is None or count <= window):
            return None
        seen = torch.arange(context, device=self.device)
        query = seen[start : start + count, None]
        mask = seen <= (query if lasts is None else lasts[:, None])
        return mask if window is None else mask & (seen > query - window)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values, self.device)

    def attend(
        self, plan: TorchPlan, layer: int, qkv: torch.Tensor, weights: AttentionWeights
    ) -> torch.Tensor:
        spec = self.model.layers[layer].attention
        if spec.clip:
            qkv = qkv.clamp(-spec.clip, spec.clip)
        if spec.norms_values:
            qkv = with_values(qkv, spec)
        if spec.is_gated:
            qkv, gate = without_gate(qkv, spec)
            return self._attend(plan, layer, qkv, weights) * gate.sigmoid()
        return self._attend(plan, layer, qkv, weights)

    def _attend(
        self, plan: TorchPlan, layer: int, qkv: torch.Tensor, weights: AttentionWeights
    ) -> torch.Tensor:
        """Attend as `attend` does, without the gate."""
        spec = self.model.layers[layer].attention
        q, k, v = turned_heads(spec, qkv, weights.qk_norm, plan.turns)
        grouped = q.reshape(len(q), spec.num_kv_heads, -1, spec.head_dim)
        of_heads = OfHeads(weights.sinks, self._slopes.get(spec.slopes)).grouped(grouped)
        if self.model.is_causal:
            if spec.keys_of is None:
                self._write(plan, layer, k, v)
            return self._attend_pages(plan, layer, grouped, of_heads).flatten(1)
        out = torch.empty_like(grouped)
        for chunk in plan.chunks:
            tokens = slice(chunk.begin, chunk.end)
            keys, values = k[tokens].transpose(0, 1), v[tokens].transpose(0, 1)
            mask = chunk.mask(spec)
            out[tokens] = _attend_chunk(spec, grouped[tokens], keys, values, mask, of_heads)
        return out.flatten(1)

    def attend_latents(
        self,
        plan: TorchPlan,
        layer: int,
        products: tuple[torch.Tensor, torch.Tensor],
        weights: LatentWeights,
        lora: LoraBatch | None,
        site: Site,
    ) -> torch.Tensor:
        absorbed = AbsorbedKeys(weights, lora, site)
        q, k = absorbed.queries_and_keys(*products, plan.turns)
        self._write(plan, layer, k, k[..., : weights.spec.latent])
        return absorbed.values(self._attend_pages(plan, layer, q, NO_NUMBERS)[:, 0])

    def attend_distances(
        self,
        plan: TorchPlan,
        layer: int,
        qkv: torch.Tensor,
        vectors: DistanceProduct,
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        spec, of = self.model.layers[layer].attention, self.model.distances
        assert of is not None
        texts = [slice(chunk.begin, chunk.end) for chunk in plan.chunks]
        return attend_distances((spec, of), qkv, texts, vectors, lora)

    def _write(self, plan: TorchPlan, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values, `[tokens, kv_heads, features]` each, to their pages."""
        group = self.cache.groups.group(layer)
        # A reused page may hold another sequence's NaN behind the last token written.
        self.cache.clear(layer, plan.fresh_pages[group])
        self.cache.write(layer, plan.pages[group], plan.offsets, k, v)

    def _attend_pages(
        self, plan: TorchPlan, layer: int, grouped: torch.Tensor, of_heads: OfHeads
    ) -> torch.Tensor:
        """Attend to keys and values in pages. grouped: queries, `[tokens, kv_heads, group,
        head_dim]` -> the same, as wide as values."""
        spec = self.model.layers[layer].attention
        of_pages = self.cache.groups.group(layer)
        out = grouped.new_empty(*grouped.shape[:-1], self.cache.of(layer)[1].shape[-1])
        for group in plan.decodes:
            keys, values = self.cache.read(layer, group.pages[of_pages])
            mask = group.masks[spec.window]
            out[group.tokens] = _attended(spec, grouped[group.tokens], keys, values, mask, of_heads)
        for chunk in plan.chunks:
            found = self.cache.read(layer, chunk.pages[of_pages])
            keys, values = (each[0, :, : chunk.context] for each in found)
            tokens = slice(chunk.begin, chunk.end)
            mask = chunk.mask(spec)
            out[tokens] = _attend_chunk(spec, grouped[tokens], keys, values, mask, of_heads)
        return out

    def mix_states(
        self,
        plan: TorchPlan,
        layer: int,
        products: Sequence[torch.Tensor],
        weights: StateWeights,
        over_devices: DeviceSum | None = None,
    ) -> torch.Tensor:
        if plan.states is None:
            raise TypeError("a plan without states")
        steps, states = plan.states.steps, self.states.of(layer)
        for state in states:
            state.index_fill_(0, plan.states.begun, 0)
        replayed = [kept[plan.states.replayed] for kept in self.states.inputs(layer)]
        taken = [torch.cat(both) for both in zip(replayed, products, strict=True)]
        self.states.keep(layer, steps.keep, products)
        moves = self.states.walk(layer, steps)
        found = mix_states(moves, taken, weights, states, over_devices)
        return found[len(plan.states.replayed) :]


def _attend_chunk(
    spec: AttentionSpec,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    of_heads: OfHeads,
) -> torch.Tensor:
    """Compute attention of one chunk. q `[n, kv_heads, group, head_dim]`; keys, values `[kv_heads,
    context, head_dim]`, which the group shares.
    """
    group = q.shape[2]
    keys, values = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))
    queries = q.permute(1, 2, 0, 3)
    attended = _attended(spec, queries, keys, values, mask, of_heads.of_each_query())
    return attended.permute(2, 0, 1, 3)


def _attended(
    spec: AttentionSpec,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    of_heads: OfHeads,
) -> torch.Tensor:
    """Compute attention. q `[a, b, n, head_dim]`, keys and values `[a, b, m, head_dim]`; mask: True
    = seen, to be broadcast to `[a, b, n, m]`; None = plainly causal, and n is m. of_heads: to be
    broadcast to `[a, b, n, 1]`.
    """
    sinks, slopes = of_heads
    if spec.softcap is None and sinks is None and slopes is None:
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, scale=spec.scale
        )
    if mask is None:
        mask = q.new_ones(q.shape[-2], keys.shape[-2], dtype=torch.bool).tril()
    scores = q @ keys.transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if slopes is not None:  # from the last key on: softmax does not mind
        count = keys.shape[-2]
        scores = scores + slopes * torch.arange(1 - count, 1, device=q.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores.float(), sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : keys.shape[-2]]
    return weights.to(q.dtype) @ values
