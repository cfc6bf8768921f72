"""Refusals of `--batch-invariant`, by the model and by other options. Pure."""

from loraplex.server.config import ConfigError, EngineConfig
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec


def require_invariance(model: ModelSpec, config: EngineConfig) -> None:
    """Check that no answer's bits can depend on its batch, where that is asked for. Raises
    ConfigError, which names each reason why they would.
    """
    if not config.batch_invariant:
        return
    reasons = [*_of_options(config), *_of_model(model)]
    if config.device == "cuda":
        reasons += _of_kernels(model)
    if reasons:
        raise ConfigError(f"--batch-invariant: {'; '.join(reasons)}")


def _of_options(config: EngineConfig) -> list[str]:
    reasons = []
    if config.shards > 1:
        reasons.append(f"--tp {config.shards}: devices sum in an order that depends on the batch")
    if config.max_draft:
        reasons.append(f"--max-draft {config.max_draft}: drafts are not checked in this mode")
    return reasons


def _of_model(model: ModelSpec) -> list[str]:
    reasons = []
    if not model.is_causal:
        reasons.append("the model reads whole texts and writes no answers")
    if model.states:
        reasons.append("the model has states, whose sums depend on how a prompt is cut")
    if model.pictures is not None:
        reasons.append(
            "pictures are encoded together: --picture-memory 0 serves the model's text part"
        )
    return reasons


def _of_kernels(model: ModelSpec) -> list[str]:
    """Reasons on a GPU. On a CPU tokens are computed one by one."""
    reasons = []
    if model.quantisation is not None:
        reasons.append(f"quantised weights ({model.quantisation.scheme}) have several kernels")
    if any(isinstance(of, LatentSpec) for of in model.attentions.values()):
        reasons.append("attention to latents has several kernels")
    feeds = (feed for layer in model.layers for feed in layer.feed_forwards)
    if any(isinstance(feed, MoeSpec) for feed in feeds):
        reasons.append("mixtures of experts have several kernels")
    return reasons
