"""Products, norms and activations of any tokens by plain torch: they need no cache and no plan.
Operations by element are those of every set of ops."""

import torch
from torch.nn import functional

from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.model.devices.group import DeviceSum
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.linear import Linear, MoeWeights
from loraplex.server.model.lora.lora import LoraBatch
from loraplex.server.model.lora.own_rows import (
    embed_own,
    forbid_others,
    ids_of_base,
    norm_own,
    own_logits,
    widened,
)
from loraplex.server.model.lora.sites import BranchSites, Site
from loraplex.server.model.routed_experts import ChosenExperts
from loraplex.server.model.spec.model_spec import Activation, AttentionSpec
from loraplex.server.model.spec.moe_spec import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    ExpertActivation,
    MoeSpec,
)
from loraplex.server.model.weights import LayerNorm, Norm, RmsNorm


def layer_norm(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    """LayerNorm over the last dimension: `[..., features]` -> the same."""
    if norm.scales:
        return x * norm.weight
    return functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.epsilon)


def layer_normed_heads(qkv: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    """Norm each head of q and k. qkv: `[tokens, features]`, of q first, then of k; norm: weights
    `[heads, head_dim]` of these heads, perhaps for each token -> the same shape as qkv."""
    count, size = norm.weight.shape[-2:]
    heads = qkv.view(len(qkv), -1, size)
    normed = functional.layer_norm(heads[:, :count], (size,), eps=norm.epsilon) * norm.weight
    normed = normed if norm.bias is None else normed + norm.bias
    return torch.cat((normed, heads[:, count:]), dim=1).flatten(1)


def rms_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """RMS norm over the last dimension, in float32: `[..., features]` -> the same."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    return (norm.weight * scaled.to(norm.weight.dtype)).to(x.dtype)


def activated(
    x: torch.Tensor, activation: Activation, numbers: torch.Tensor | None = None
) -> torch.Tensor:
    """The activation of every element. numbers: of `xielu`."""
    match activation:
        case "silu":
            return functional.silu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "gelu":
            return functional.gelu(x)
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case "tanh":
            return torch.tanh(x)
        case "xielu":
            if numbers is None:
                raise TypeError("xIELU needs its numbers")
            return xielu(x, numbers)


def gated(gate_up: torch.Tensor, activation: Activation, factor: float = 1.0) -> torch.Tensor:
    """`activation(factor * gate) * up` of `[tokens, 2 n]`, gate first -> `[tokens, n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activated(gate if factor == 1.0 else gate * factor, activation) * up


def without_gate(qkv: torch.Tensor, attention: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Part a product of gated attention. qkv: `[tokens, (2 heads + 2 kv_heads) * head_dim]`, q and
    its gate head by head -> the same without gates, and gates `[tokens, heads * head_dim]`."""
    q_and_gate, kv = qkv.split((2 * attention.q_size, 2 * attention.kv_size), dim=1)
    q, gate = q_and_gate.unflatten(1, (-1, 2, attention.head_dim)).unbind(2)
    return torch.cat((q.flatten(1), kv), dim=1), gate.flatten(1)


def with_values(qkv: torch.Tensor, attention: AttentionSpec) -> torch.Tensor:
    """Norm the values of a product, `[tokens, (heads + 2 kv_heads) * head_dim]`; where keys are
    values it has none -> the same width with them."""
    others = attention.q_size + attention.kv_size
    first = attention.q_size if attention.keys_are_values else others
    values = qkv[:, first : first + attention.kv_size].unflatten(1, (-1, attention.head_dim))
    normed = functional.rms_norm(values, (attention.head_dim,), eps=attention.qk_epsilon)
    return torch.cat((qkv[:, :others], normed.flatten(1)), dim=1)


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The activation xIELU (arXiv 2411.13010). numbers: float32 `[4]`, the curvature of positive
    and of negative inputs, the slope, and the largest input of the exponential."""
    wide = x.float()
    positive, negative, slope, epsilon = numbers
    below = (torch.expm1(torch.minimum(wide, epsilon)) - wide) * negative
    curved = torch.where(wide > 0, positive * wide * wide, below)
    found: torch.Tensor = (curved + slope * wide).to(x.dtype)
    return found


def wide_logits(x: torch.Tensor, router: DenseLinear) -> torch.Tensor:
    """A router's logits in float32. x: `[tokens, hidden]` -> `[tokens, experts]`."""
    if not x.is_cuda:
        return functional.linear(x.float(), router.weight.float())
    return torch.mm(x, router.weight.T, out_dtype=torch.float32)


def run_experts(
    x: torch.Tensor,
    routed_by: torch.Tensor,
    weights: MoeWeights,
    lora: LoraBatch | None,
    sites: BranchSites,
    noted: ChosenExperts | None = None,
) -> torch.Tensor:
    """Route tokens to experts and compute these, with LoRA, as `Ops.moe` says. noted: takes the
    choice."""
    of_router, of_gate_up, of_down = sites
    chosen, shares = routed(routed_by, weights, lora, of_router)
    if noted is not None:
        noted.note(of_router.layer, chosen)
    results = x.new_empty(*chosen.shape, weights.down.out_features)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        inputs = x[rows]
        gate_up = weights.gate_up.run(expert, inputs)
        if lora is not None:
            lora.add_expert(of_gate_up, expert, rows, inputs, gate_up)
        inner = _activated(gate_up, weights.spec.activation)
        found = weights.down.run(expert, inner)
        if lora is not None:
            lora.add_expert(of_down, expert, rows, inner, found)
        results[rows, places] = found
    return (results * shares.unsqueeze(-1)).sum(1).to(x.dtype)


def _activated(gate_up: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    """Apply the gated activation: `[rows, 2 n]`, gate first -> `[rows, n]`; or without gate."""
    if activation == "relu2":
        return activated(gate_up, "relu2")
    gate, up = gate_up.chunk(2, dim=-1)
    if activation != "clamped_swiglu":
        return activated(gate, activation) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


def routed(
    x: torch.Tensor, weights: MoeWeights, lora: LoraBatch | None, site: Site
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts. x: `[tokens, hidden]` -> each token's experts, int64 `[tokens,
    top_k]`, and their weights, the largest first. site: of the router.
    """
    spec, router = weights.spec, weights.router
    logits = wide_logits(x, router) if spec.wide_router else router.run(x)
    if lora is not None:
        lora.add(site, x, logits)
    if spec.rule == "top_k_softmax":
        largest = logits.topk(spec.top_k)
        return largest.indices, largest.values.softmax(-1)
    if spec.rule == "sparse_mixer":
        return _mixed(logits, spec)
    wide = logits.float()
    scores = wide.sigmoid() if spec.by_sigmoid else wide.softmax(-1)
    chosen = _choose(scores, weights).topk(spec.top_k).indices
    shares = scores.gather(-1, chosen)
    if spec.is_normed:
        summed = shares.sum(-1, keepdim=True).clamp(min=spec.norm_floor)
        shares = shares / (summed + spec.norm_added)
    if spec.factor != 1.0:
        shares = shares * spec.factor
    if weights.scales is not None:
        shares = shares * weights.scales[chosen]
    return chosen, shares if spec.wide_weights else shares.to(x.dtype)


def _mixed(logits: torch.Tensor, spec: MoeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts in turn (SparseMixer, arXiv 2310.00811). Returns as `routed`."""
    chosen, shares, left = [], [], logits
    for _ in range(spec.top_k):
        best = left.max(-1, keepdim=True)
        is_far = (best.values - logits) / logits.abs().clamp(min=best.values) > spec.margin
        near = left.masked_fill(is_far, -torch.inf).softmax(-1)
        chosen.append(best.indices)
        shares.append(near.gather(-1, best.indices))
        left = left.scatter(-1, best.indices, -torch.inf)
    return torch.cat(chosen, dim=-1), torch.cat(shares, dim=-1)


def _choose(scores: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    """Return the scores by which experts are chosen: corrected, and none of those whose group is
    not among the best. scores: `[tokens, experts]` -> the same.
    """
    if weights.correction is not None:
        scores = scores + weights.correction
    count, best = weights.spec.groups
    if count == best:
        return scores
    grouped = scores.unflatten(-1, (count, -1))
    sums = grouped.topk(weights.spec.best_of_group).values.sum(-1)
    kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, sums.topk(best).indices, True)
    return torch.where(kept.unsqueeze(-1), grouped, -torch.inf).flatten(-2)


class TorchProducts:
    """Implement those of `loraplex.server.model.ops.ops.Ops` that take each token alone, for any
    dtype and device. chosen_experts: None = nobody may ask for these.
    """

    chosen_experts: ChosenExperts | None = None

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: LoraBatch | None, site: Site
    ) -> torch.Tensor:
        if lora is None:
            return functional.embedding(token_ids, weight)
        y = functional.embedding(ids_of_base(lora.own, site.number, token_ids, len(weight)), weight)
        embed_own(lora.own, site.number, token_ids, y)
        lora.add_embedding(site, token_ids, y)
        return y

    def linear(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: LoraBatch | None,
        site: Site,
        out: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = linear.run(x, out)
        if lora is not None:
            lora.add(site, x, y)
        return y

    def logits(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: LoraBatch | None,
        site: Site,
        out: torch.Tensor | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        y = linear.run(x, out)
        if lora is not None:
            lora.add(site, x, y)
            y = y if width is None else widened(y, width)
            own_logits(lora.own, site.number, x, y, linear.bias)
        return y

    def forbid_others(self, logits: torch.Tensor, lora: LoraBatch, site: Site) -> None:
        forbid_others(lora.own, site.number, logits)

    def reduce(self, y: torch.Tensor, over_devices: DeviceSum | None = None) -> torch.Tensor:
        return y if over_devices is None else over_devices(y)

    def complete(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def completed(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def with_terms(self, y: torch.Tensor, terms: SharedTerms) -> torch.Tensor:
        return y

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if isinstance(norm, LayerNorm):
            return layer_norm(x, norm)
        return rms_norm(x, norm)

    def norm_own(
        self, normed: torch.Tensor, hidden: torch.Tensor, lora: LoraBatch, place: int, norm: Norm
    ) -> None:
        norm_own(lora.own, place, norm, hidden, normed, self.norm)

    def add_norm(
        self,
        delta: torch.Tensor,
        hidden: torch.Tensor,
        norm: Norm | None,
        post: Norm | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if post is not None:
            delta = self.norm(delta, post)
        factor, kept = factors
        hidden = hidden if kept == 1.0 else hidden * kept
        hidden = hidden + (delta if factor == 1.0 else delta * factor)
        return hidden if norm is None else self.norm(hidden, norm), hidden

    def let_through(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return attended * gate.sigmoid()

    def gated(
        self, gate_up: torch.Tensor, activation: Activation, factor: float = 1.0
    ) -> torch.Tensor:
        return gated(gate_up, activation, factor)

    def activated(
        self,
        up: torch.Tensor,
        activation: Activation,
        numbers: torch.Tensor | None,
        factors: torch.Tensor | None,
    ) -> torch.Tensor:
        found = activated(up, activation, numbers)
        return found if factors is None else found * factors

    def scaled(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return y * gate.sigmoid()

    def plus(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def moe(
        self,
        x: torch.Tensor,
        routed_by: torch.Tensor,
        weights: MoeWeights,
        lora: LoraBatch | None,
        sites: BranchSites,
    ) -> torch.Tensor:
        return run_experts(x, routed_by, weights, lora, sites, self.chosen_experts)
