"""From a model's description to the rules by which kernels make scores. Pure."""

from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.model.spec.model_spec import ModelSpec


def score_rules(model: ModelSpec) -> list[ScoreRule]:
    """The rule of each layer."""
    attentions = [layer.attention for layer in model.layers]
    return [ScoreRule(each.scale, each.softcap, each.window) for each in attentions]


def distinct_windows(model: ModelSpec) -> tuple[int | None, ...]:
    """Return the model's windows, each once, in the order of the layers that have them first."""
    return tuple(dict.fromkeys(model.windows))
