"""The models that the GPU's kernels compute, and why others are left to the reference operations.
Pure."""

from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec

# Head sizes are multiples of the one, up to the other.
_HEAD_DIM_STEP, _WIDEST_HEAD, _WIDEST_OF_TEXTS = 16, 512, 256


def unsupported(model: ModelSpec, dtype: str, capability: tuple[int, int]) -> str | None:
    """Why the kernels cannot serve this model on a device of this compute capability, or None.
    dtype: of weights and activations, as torch names it."""
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        return f"FlashInfer needs compute capability 8.0, this GPU has {found}"
    added = (of.sinks or bool(of.slopes) for of in model.attentions.values())
    if not model.is_causal and (any(added) or model.distances is not None):
        return "the kernel of whole texts has no sinks, no slopes and no vectors of distances"
    if dtype == "float32":
        return "FlashInfer computes in bfloat16 and float16, not in float32"
    if any(attention.gate is not None for attention in model.attentions.values()):
        return "the kernels know no module whose outputs are gates of attention"
    if any(attention.norms_rotated for attention in model.attentions.values()):
        return "the kernels norm q and k before the rotation, the model behind it"
    experts = (feed for layer in model.layers for feed in layer.feed_forwards)
    if any(isinstance(feed, MoeSpec) and feed.rule == "sparse_mixer" for feed in experts):
        return "the kernels choose all experts of a token at once, the model one after the other"
    attentions = model.attentions.values()
    if latents := {(of.latent, of.turned) for of in attentions if isinstance(of, LatentSpec)}:
        return _beyond_latents(*latents.pop())
    widest = _WIDEST_HEAD if model.is_causal else _WIDEST_OF_TEXTS
    for size in {attention.head_dim for attention in model.attentions.values()}:
        if size % _HEAD_DIM_STEP or size > widest:
            return (
                f"the kernels' head sizes are multiples of {_HEAD_DIM_STEP} up to {widest},"
                f" the model's is {size}"
            )
    return None


def _beyond_latents(latent: int, part: int) -> str | None:
    """Why the kernels cannot serve attention to latents of this size, with a rotated part of that
    one, or None."""
    if latent % _HEAD_DIM_STEP or latent > _WIDEST_HEAD or part % _HEAD_DIM_STEP or part > latent:
        return (
            f"the kernels' latents are multiples of {_HEAD_DIM_STEP} up to {_WIDEST_HEAD}, and"
            f" their rotated parts no wider; the model's are {latent} and {part}"
        )
    return None
