"""From a model's description to the rules by which kernels make scores."""

import torch

from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec


def score_rules(model: ModelSpec, device: torch.device) -> dict[int, ScoreRule]:
    """The rule of each layer that attends, by its number."""
    return {layer: score_rule(attention, device) for layer, attention in model.attentions.items()}


def score_rule(attention: AttentionSpec, device: torch.device) -> ScoreRule:
    """The rule of one layer. device: where its slopes are to lie."""
    slopes = torch.tensor(attention.slopes, device=device) if attention.slopes else None
    return ScoreRule(attention.scale, attention.softcap, attention.window, slopes)


def distinct_windows(model: ModelSpec) -> tuple[int | None, ...]:
    """Return the model's windows, each once, in the order of the layers that have them first."""
    return tuple(dict.fromkeys(model.windows))
