"""The GPU's set of ops: FlashInfer, cuBLAS, and the project's own Triton kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.kernels.attention.decode_work import WorkLayout
from loraplex.server.kernels.attention.latent_append import NewTokens
from loraplex.server.kernels.attention.rope_append import QkNorm, rope_append, rope_append_lora
from loraplex.server.kernels.launch.configs import KernelConfigs, load_configs
from loraplex.server.kernels.linear.row_form import Rounding, RowForm, allocate_rows
from loraplex.server.kernels.linear.skinny import stages_of
from loraplex.server.kernels.pointwise.add_norm import add_experts_norm, add_norm, rms_norm
from loraplex.server.kernels.pointwise.gated import gated, gated_lora
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.kernels.pointwise.sum_norm import sum_norm
from loraplex.server.model.devices.group import DeviceSum
from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.linear.dense import Fixed
from loraplex.server.model.linear.linear import Linear, MoeWeights
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.lora.own_rows import (
    embed_own,
    forbid_others,
    ids_of_base,
    norm_own,
    own_logits,
    widened,
)
from loraplex.server.model.lora.sites import BranchSites, Site
from loraplex.server.model.ops import products_torch
from loraplex.server.model.ops.attention.attention_cuda import NOTHING, Attention, PagedAttention
from loraplex.server.model.ops.attention.prompt_attention import cache_pages
from loraplex.server.model.ops.attention.whole_cuda import WholeAttention, WholeTexts
from loraplex.server.model.ops.cuda import states_cuda
from loraplex.server.model.ops.cuda.device_lora import DeviceLora, LoraBatches
from loraplex.server.model.ops.cuda.experts_cuda import Experts
from loraplex.server.model.ops.cuda.latents_cuda import AbsorbedProducts, Unfolder, Unfolding
from loraplex.server.model.ops.cuda.lora_linear import (
    ByExperts,
    Deferred,
    Gemm,
    LinearOutput,
    LoraLinear,
    Products,
    Ready,
    Unsummed,
    WithDelta,
)
from loraplex.server.model.ops.cuda.lora_strategy import NONE_SUMMED, Consumers, SummedSites
from loraplex.server.model.ops.cuda.rotations import Rotations
from loraplex.server.model.ops.ops import DistanceProduct, KVCache, StepLayout
from loraplex.server.model.ops.products_torch import (
    layer_norm,
    wide_logits,
    with_values,
    without_gate,
)
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.ops.turned_heads import normed_heads
from loraplex.server.model.routed_experts import ChosenExperts
from loraplex.server.model.spec.model_spec import Activation, AttentionSpec, ModelSpec
from loraplex.server.model.weight_source import StateWeights
from loraplex.server.model.weights import AttentionWeights, LayerNorm, Norm


def first_rows(buffer: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return `[rows, width]` at the beginning of a flat buffer, which layers of any width share."""
    return buffer[: rows * width].view(rows, width)


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """Preparation of a step's attention. positions: int64 `[tokens]`; slots: `CudaOps.kv_slots`, -1
    = a token that is no prompt's; captured steps of decodes have no slots. attended: flat, where
    each layer's result is to lie; None: anywhere. turns: see `Rotations.turns`. texts: of a model
    whose tokens see all others. states: of a model that has some. unfolding: prompts whose latents
    are unfolded; None = none.
    """

    positions: torch.Tensor
    slots: torch.Tensor | None
    attention: Attention
    attended: torch.Tensor | None = None
    turns: torch.Tensor | None = None
    texts: WholeTexts | None = None
    states: states_cuda.StatePlan = states_cuda.NO_STATES
    unfolding: Unfolding | None = None

    @property
    def angles(self) -> torch.Tensor:
        """Rows of the rotations' tables, int64 `[tokens]`."""
        return self.positions if self.turns is None else self.turns


class CudaOps:
    """Implements `loraplex.server.model.ops.ops.Ops` in bfloat16 and float16.

    Sums are float32.
    """

    def __init__(
        self,
        model: ModelSpec,
        cache: KVCache,
        table: AdapterTable,
        attention: PagedAttention | WholeAttention,
        limits: tuple[int, int],
        summed: SummedSites = NONE_SUMMED,
        row_form: RowForm | None = None,
        *,
        states: RowStates,
    ) -> None:
        """Make the operations for one model on the current GPU. limits: the longest context, and
        the most tokens of a step, with what pads it. row_form: the rounding that norms and
        activations leave beside what they write; None = none.
        """
        max_context, max_tokens = limits
        self.model = model
        self.cache, self.states = cache, states
        self.chosen_experts: ChosenExperts | None = None
        self.table = table
        self._attention = attention
        self.device = cache.pool.device
        # No bit of a token's results depends on the others of its step.
        self.is_batch_invariant = isinstance(attention, PagedAttention) and attention.is_one_kernel
        form = {"batch_invariant": self.is_batch_invariant}
        self._configs: KernelConfigs = load_configs(self.device, **form)
        fixed = None
        if self.is_batch_invariant:
            fixed = Fixed(stages_of(torch.cuda.get_device_capability(self.device)))
        self.products = Products(self._configs, fixed)
        self._row_form = row_form
        self._experts = Experts(self._configs, self.products, table)
        self.rotations = Rotations(model, max_context, max_tokens, self.device)
        context = (self._configs, table, cache.dtype, self.device, max_tokens)
        consumers = Consumers.of(model, rounded_cache=cache.is_rounded, summed=summed)
        if self.is_batch_invariant:
            consumers = consumers.of_one_way()
        self.lora_batches = LoraBatches(*context, consumers)
        self.unfolder = Unfolder(model, cache, self.lora_batches, max_tokens)
        self._lora_linear = LoraLinear(
            self._configs, table.device_table, self.products, self.device
        )

    # ---- once a step

    def plan(self, layout: StepLayout) -> CudaPlan:
        if isinstance(self._attention, WholeAttention):
            return CudaPlan(layout.positions, None, NOTHING, texts=self._attention.plan(layout))
        if self.is_batch_invariant:
            layout = layout.as_prompts()
        positions, slots = layout.positions, self.kv_slots(layout)
        turns = self.rotations.turns(layout)
        attention = self._attention.plan(layout, turns)
        size = self.states.scratch, self.states.depth
        states = states_cuda.NO_STATES
        if self.states:
            states = states_cuda.plan_states(layout, *size)
        unfolding = self.unfolder.plan(layout)
        return CudaPlan(
            positions, slots, attention, turns=turns, states=states, unfolding=unfolding
        )

    def kv_slots(self, layout: StepLayout) -> torch.Tensor:
        """Compute places in the cache, int64 `[groups, tokens]`: page * page_size + offset of each
        token's keys and values.
        """
        size = self.cache.page_size
        pages = layout.page_table[:, layout.token_rows, layout.positions // size]
        return pages * size + layout.positions % size

    def lora(self, token_slots: np.ndarray) -> DeviceLora | None:
        return self.lora_batches.eager(token_slots)

    def decode_work(self, batch: int) -> WorkLayout:
        """Lay out the work of a decode batch, as `PagedAttention.work` does."""
        return self._paged.work(batch)

    @property
    def _paged(self) -> PagedAttention:
        if isinstance(self._attention, WholeAttention):
            raise TypeError("texts are whole, and have no pages")
        return self._attention

    def route(self, lora: DeviceLora) -> None:
        """Route the batch by its slots as they are now; a captured step begins with it."""
        lora.route(self.table.device_table)

    # ---- operations

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: DeviceLora | None, site: Site
    ) -> torch.Tensor:
        if lora is None or not lora.model_sites:
            return functional.embedding(token_ids, weight)
        known = ids_of_base(lora.own, site.number, token_ids, len(weight))
        y = functional.embedding(known, weight)
        embed_own(lora.own, site.number, token_ids, y)
        self._lora_linear.add_embedding(known, y, lora, site)
        return y

    def linear(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: DeviceLora | None,
        site: Site,
        out: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> LinearOutput:
        """Compute a product with LoRA, as `ShardedOps` says."""
        if lora is None:
            return Ready(self.products.linear(x, linear, out))
        y = x.new_empty(len(x), linear.out_features) if out is None else out
        return self._lora_linear.run(Gemm(x, linear, y), lora, site, delta)

    def logits(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: DeviceLora | None,
        site: Site,
        out: torch.Tensor | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        y = self.products.linear(x, linear, out)
        if lora is not None and lora.model_sites:
            self._lora_linear.add(x, y, lora, site)
            y = y if width is None else widened(y, width)
            one_by_one = self.is_batch_invariant
            own_logits(lora.own, site.number, x, y, linear.bias, one_by_one=one_by_one)
        return y

    def forbid_others(self, logits: torch.Tensor, lora: DeviceLora, site: Site) -> None:
        forbid_others(lora.own, site.number, logits)

    def reduce(self, y: LinearOutput, over_devices: DeviceSum | None = None) -> LinearOutput:
        if over_devices is None or isinstance(y, Unsummed):
            return y
        return Ready(over_devices(self.complete(y)))

    def complete(self, y: LinearOutput) -> torch.Tensor:
        """Return a product as one finished tensor, as `ShardedOps` says."""
        match y:
            case Ready():
                return y.y
            case ByExperts():
                summed = y.y.new_zeros(len(y.weights), y.y.shape[1])
                early = self._configs.programmatic_launch
                add_experts_norm(y.terms, summed, None, programmatic_launch=early)
                return summed
            case _:
                raise TypeError("a product that is summed over devices defers no LoRA")

    def completed(self, y: torch.Tensor) -> LinearOutput:
        return Ready(y)

    def with_terms(self, y: LinearOutput, terms: SharedTerms) -> Unsummed:
        """Mark a product as a term of a sum over devices, as `ShardedOps` says."""
        match y:
            case Ready():
                return Unsummed(y.y, None, terms)
            case WithDelta():
                return Unsummed(y.y, y.delta, terms)
            case _:
                raise TypeError("the norm expands no LoRA")

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if isinstance(norm, LayerNorm):
            return layer_norm(x, norm)
        early, rounding = self._configs.programmatic_launch, self._rounding(x)
        return self._noted(rms_norm(x, norm, rounding, programmatic_launch=early), rounding)

    def _rounding(self, x: torch.Tensor, features: int | None = None) -> Rounding | None:
        """Room for rounded rows like x, of so many features."""
        form = self._row_form
        return None if form is None else (allocate_rows(x, form, features), form)

    def _noted(self, x: torch.Tensor, rounding: Rounding | None) -> torch.Tensor:
        """Keep x rounded for the products that follow."""
        self.products.note(x, rounding)
        return x

    def norm_own(
        self, normed: torch.Tensor, hidden: torch.Tensor, lora: DeviceLora, place: int, norm: Norm
    ) -> None:
        norm_own(lora.own, place, norm, hidden, normed, self.norm)
        self.products.note(normed, None)

    def add_norm(
        self,
        delta: LinearOutput,
        hidden: torch.Tensor,
        norm: Norm | None,
        post: Norm | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add delta to hidden, in place, and norm the sum. Returns the normed rows and hidden."""
        if isinstance(norm, LayerNorm):
            _, hidden = self.add_norm(delta, hidden, None, post, factors)
            return layer_norm(hidden, norm), hidden
        if isinstance(post, LayerNorm):
            raise TypeError("no kernel has a LayerNorm before the residual sum")
        pending, early = None, self._configs.programmatic_launch
        rule, rounding = (
            (hidden, norm, post, factors),
            None if norm is None else self._rounding(hidden),
        )
        match delta:
            case Ready():
                pass
            case WithDelta():
                pending = delta.delta
            case ByExperts():
                normed = add_experts_norm(
                    delta.terms, *rule, rounding=rounding, programmatic_launch=early
                )
                return self._noted(normed, rounding), hidden
            case Unsummed():
                terms, pending = delta.terms, delta.delta
                return sum_norm(terms, pending, *rule, programmatic_launch=early), hidden
            case Deferred():
                raise TypeError("the norm expands no LoRA")
            case _:
                assert_never(delta)
        add_norm(delta.y, pending, *rule, rounding=rounding, programmatic_launch=early)
        return hidden if norm is None else self._noted(delta.y, rounding), hidden

    def attend(
        self, plan: CudaPlan, layer: int, qkv: LinearOutput, weights: AttentionWeights
    ) -> torch.Tensor:
        spec = self.model.layers[layer].attention
        if spec.clip:
            qkv = Ready(self.complete(qkv).clamp_(-spec.clip, spec.clip))
        if not spec.is_gated:
            return self._attend(plan, layer, qkv, weights)
        ungated, gate = without_gate(self.complete(qkv), spec)
        return self._attend(plan, layer, Ready(ungated), weights).mul_(gate.sigmoid())

    def _attend(
        self, plan: CudaPlan, layer: int, qkv: LinearOutput, weights: AttentionWeights
    ) -> torch.Tensor:
        """Attend as `attend` does, without the gate."""
        qk_norm, sinks = weights.qk_norm, weights.sinks
        attention, spec = plan.attention, self.model.layers[layer].attention
        if isinstance(self._attention, WholeAttention):
            out = _room_attended(plan, qkv.y, spec.q_size)
            return self._attention.run(plan.texts, layer, self.complete(qkv), qk_norm, out)
        if qk_norm is not None and qk_norm.dim() > 2:
            qkv, qk_norm = self._normed_heads(spec, qkv, qk_norm), None
        y = qkv.y
        out = _room_attended(plan, y, spec.q_size)
        heads = out.view(len(y), spec.num_heads, spec.head_dim)
        delta = q = None
        match qkv:
            case Ready():
                if plan.slots is not None:
                    q = self._rotate(plan, plan.slots, layer, y, qk_norm)
            case WithDelta():  # every token is a decode
                delta = qkv.delta
            case Deferred():  # decodes read the sum that the rotation leaves in y
                q = self._expand_and_rotate(plan, layer, qkv, qk_norm)
            case ByExperts() | Unsummed():
                raise TypeError("attention sums nothing")
            case _:
                assert_never(qkv)
        if attention.decode is not None:
            rotation = (self.rotations[layer], self._norm(layer, qk_norm))
            batch, rows = attention.decode, attention.decodes
            self._paged.decode(batch, layer, y[rows], delta, rotation, sinks, heads[rows])
        if attention.prefill is not None and q is not None:
            attention.prefill.run(layer, q, heads[attention.prompts], sinks)
        return out

    def attend_latents(
        self,
        plan: CudaPlan,
        layer: int,
        products: tuple[LinearOutput, LinearOutput],
        weights: LatentWeights,
        lora: DeviceLora | None,
        site: Site,
    ) -> torch.Tensor:
        q, kept = (self.complete(product) for product in products)
        attention, unfolding, spec = plan.attention, plan.unfolding, weights.spec
        table, early = self.table.device_table, self._configs.programmatic_launch
        absorbed = AbsorbedProducts(weights, lora, table, site, early)
        count = len(q) if unfolding is None else unfolding.absorbed
        group, rotation = self.cache.groups.group(layer), self.rotations[layer]
        if plan.slots is not None:
            new = NewTokens(plan.angles, plan.slots[group])
        elif attention.decode is not None:
            new = NewTokens(plan.angles, attention.decode[group])
        else:
            raise TypeError("a step of decodes alone, and no decodes")
        queries = absorbed.append(q, kept, self.cache.of(layer)[0], rotation, new, count)
        # What pads a captured step reads zeros.
        make = queries.new_empty if plan.attended is None else queries.new_zeros
        read = make(count, queries.shape[1], spec.latent)
        if attention.decode is not None:
            rows = attention.decodes
            self._paged.decode_latents(attention.decode, layer, queries[rows], read[rows])
        prompts = attention.prompts
        if attention.prefill is not None:
            attention.prefill.run(layer, queries[prompts], read[prompts])
        room = _room_attended(plan, q, queries.shape[1] * spec.value_dim)
        out = room.view(len(q), -1, spec.value_dim)
        absorbed.values(read, out[:count])
        if unfolding is not None:
            own = q.view(len(q), -1, spec.nope + spec.turned)
            if rotation.q_scale is not None:
                own.mul_(rotation.q_scale[plan.angles, None, None])
            both = own[prompts], queries[prompts][..., spec.latent :]

            def product(latents: torch.Tensor, of: DeviceLora | None) -> torch.Tensor:
                return self.complete(self.linear(latents, weights.kv_b, of, site))

            self.unfolder.attend(unfolding, layer, both, product, lora, out[prompts])
        return room

    def attend_distances(
        self,
        plan: CudaPlan,
        layer: int,
        qkv: torch.Tensor,
        vectors: DistanceProduct,
        lora: DeviceLora | None,
    ) -> torch.Tensor:
        raise TypeError("no kernel scores tokens with distances")

    def mix_states(
        self,
        plan: CudaPlan,
        layer: int,
        products: Sequence[LinearOutput],
        weights: StateWeights,
        over_devices: DeviceSum | None = None,
    ) -> torch.Tensor:
        complete = [self.complete(product) for product in products]
        slices, kept = self.states.walk(layer, plan.states), self.states.inputs(layer)
        states = self.states.of(layer)
        found = states_cuda.mix_states(slices, complete, weights, states, kept, over_devices)
        self.states.keep(layer, plan.states.keep, complete)
        return found

    def _rotate(
        self,
        plan: CudaPlan,
        slots: torch.Tensor,
        layer: int,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queries of prompts, whose keys and values go to their pages."""
        prompts = plan.attention.prompts
        places = (plan.angles[prompts], slots[self.cache.groups.group(layer), prompts])
        pages, norm = cache_pages(self.cache, layer), self._norm(layer, qk_norm)
        return rope_append(qkv[prompts], self.rotations[layer], *places, pages, norm)

    def _normed_heads(
        self, spec: AttentionSpec, qkv: LinearOutput, weights: torch.Tensor
    ) -> LinearOutput:
        """Norm q and k by weights of each token, which the rotation does not know."""
        y = self.complete(qkv)
        y = with_values(y, spec) if spec.norms_values else y
        heads = y.view(len(y), -1, spec.head_dim)[:, : weights.shape[1]]
        heads.copy_(normed_heads(spec, heads, weights))
        return Ready(y)

    def _norm(self, layer: int, weights: torch.Tensor | None) -> QkNorm | None:
        """The norm of q and k."""
        if weights is None:
            return None
        spec = self.model.layers[layer].attention
        return QkNorm(weights, spec.qk_epsilon, spec.norms_all_heads, spec.norms_values)

    def _expand_and_rotate(
        self, plan: CudaPlan, layer: int, qkv: Deferred, qk_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Rotate prompts as `_rotate` does, and expand LoRA; decodes get LoRA's part."""
        if plan.slots is None:
            raise TypeError("a step of decodes alone defers no LoRA of qkv")
        y, prompts = qkv.y, plan.attention.prompts
        pages, norm = cache_pages(self.cache, layer), self._norm(layer, qk_norm)
        slots = plan.slots[self.cache.groups.group(layer)]
        context = (self.rotations[layer], plan.angles, slots, pages, norm)
        return rope_append_lora(y, qkv.lora, prompts.start, *context, self._configs.rope(len(y)))

    def let_through(self, attended: torch.Tensor, gate: LinearOutput) -> torch.Tensor:
        return attended.mul_(self.complete(gate).sigmoid())

    def gated(
        self, gate_up: LinearOutput, activation: Activation, factor: float = 1.0
    ) -> torch.Tensor:
        if (activation != "silu" and activation != "gelu_tanh") or factor != 1.0:
            return products_torch.gated(self.complete(gate_up), activation, factor)
        y, configs = gate_up.y, self._configs
        early = configs.programmatic_launch
        match gate_up:
            case Ready() | WithDelta():
                delta = gate_up.delta if isinstance(gate_up, WithDelta) else None
                rounding = self._rounding(y, y.shape[1] // 2)
                return self._noted(
                    gated(y, delta, activation, rounding, programmatic_launch=early), rounding
                )
            case Deferred(shrunk=shrunk):
                config = configs.fused_shrink(len(y))
                if shrunk is None:
                    config = configs.fused(gate_up.phase, len(y))
                return gated_lora(y, gate_up.lora, config, activation, shrunk)
            case ByExperts() | Unsummed():
                raise TypeError("an activation sums nothing")
            case _:
                assert_never(gate_up)

    def activated(
        self,
        up: LinearOutput,
        activation: Activation,
        numbers: torch.Tensor | None,
        factors: torch.Tensor | None,
    ) -> torch.Tensor:
        y, early = self.complete(up), self._configs.programmatic_launch
        if factors is not None and activation == "gelu_tanh":
            return gated(y, None, activation, up=factors, programmatic_launch=early)
        found = products_torch.activated(y, activation, numbers)
        return found if factors is None else found * factors

    def scaled(self, y: LinearOutput, gate: LinearOutput) -> LinearOutput:
        return Ready(self.complete(y) * self.complete(gate).sigmoid())

    def plus(self, a: LinearOutput, b: LinearOutput) -> LinearOutput:
        for experts, other in ((a, b), (b, a)):
            if isinstance(experts, ByExperts) and experts.beside is None:
                return replace(experts, beside=self.complete(other))
        return Ready(self.complete(a) + self.complete(b))

    def moe(
        self,
        x: torch.Tensor,
        routed_by: torch.Tensor,
        weights: MoeWeights,
        lora: DeviceLora | None,
        sites: BranchSites,
    ) -> LinearOutput:
        lora = lora if lora is not None and lora.expert_sites else None
        if weights.spec.wide_router and lora is not None:
            logits = self._lora_linear.router(routed_by, weights.router, lora, sites[0])
        elif weights.spec.wide_router:
            logits = wide_logits(routed_by, weights.router)
        else:
            logits = self.complete(self.linear(routed_by, weights.router, lora, sites[0]))
        noted, chosen = self.chosen_experts, None
        if noted is not None:
            chosen = noted.room(sites[0].layer, len(x))
        return self._experts.run(x, logits, weights, lora, sites[1:], chosen)


def _room_attended(plan: CudaPlan, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Room for what as many rows attend, in that of a captured step where there is some."""
    own = plan.attended
    return rows.new_empty(len(rows), width) if own is None else first_rows(own, len(rows), width)
