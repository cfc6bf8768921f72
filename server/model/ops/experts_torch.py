"""A layer of experts in plain torch."""

import torch
from torch.nn import functional

from loraplex.server.model.linear.experts import MoeWeights
from loraplex.server.model.lora.lora import LoraBatch
from loraplex.server.model.lora.sites import LayerSites
from loraplex.server.model.spec.moe_spec import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertActivation


def run_experts(
    x: torch.Tensor, weights: MoeWeights, lora: LoraBatch | None, sites: LayerSites
) -> torch.Tensor:
    """As `Ops.moe`."""
    chosen, shares = route(x, weights)
    results = x.new_empty(*chosen.shape, weights.down.out_features)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        inputs = x[rows]
        gate_up = weights.gate_up.run(expert, inputs)
        if lora is not None:
            lora.add_expert(sites.gate_up, expert, rows, inputs, gate_up)
        inner = _activated(gate_up, weights.spec.activation)
        found = weights.down.run(expert, inner)
        if lora is not None:
            lora.add_expert(sites.down, expert, rows, inner, found)
        results[rows, places] = found
    return (results * shares.unsqueeze(-1)).sum(1).to(x.dtype)


def _activated(gate_up: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    """`[rows, 2 n]`, gate first -> `[rows, n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


def route(x: torch.Tensor, weights: MoeWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """x: `[tokens, hidden]` -> each token's experts, int64 `[tokens, top_k]`, and their weights,
    the largest first."""
    spec, logits = weights.spec, weights.router.run(x)
    if spec.rule == "top_k_softmax":
        largest = logits.topk(spec.top_k)
        return largest.indices, largest.values.softmax(-1)
    shares, chosen = logits.softmax(-1, dtype=torch.float32).topk(spec.top_k)
    if spec.rule == "softmax_top_k_normed":
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares if spec.wide_weights else shares.to(x.dtype)
