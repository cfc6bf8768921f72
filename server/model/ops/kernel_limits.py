"""Which models the GPU's kernels compute, and why others are left to the reference operations.
Pure."""

from math import isclose

from server.model.moe_spec import MoeSpec
from server.model.spec import LayerSpec, ModelSpec

# Head sizes are multiples of the one, up to the other.
_HEAD_DIM_STEP, _WIDEST_HEAD = 16, 256


def unsupported(model: ModelSpec, dtype: str, capability: tuple[int, int]) -> str | None:
    """Why the kernels cannot serve this model on a device of this compute capability, or None.
    dtype: of weights and activations, as torch names it."""
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        return f"FlashInfer needs compute capability 8.0, this GPU has {found}"
    if dtype == "float32":
        return "FlashInfer computes in bfloat16 and float16, not in float32"
    if model.head_dim % _HEAD_DIM_STEP or model.head_dim > _WIDEST_HEAD:
        return (
            f"the kernels' head sizes are multiples of {_HEAD_DIM_STEP} up to {_WIDEST_HEAD}, the"
            f" model's is {model.head_dim}"
        )
    windows = [window for window in model.windows if window is not None]
    if windows:
        return (
            "sliding windows are left to the reference attention; with a --max-context of at most"
            f" {min(windows)} the model has none"
        )
    return next(filter(None, map(_other_maths, set(model.layers))), None)


def _other_maths(layer: LayerSpec) -> str | None:
    """What of a layer the kernels do not compute."""
    attention = layer.attention
    if attention.softcap is not None:
        return "a soft cap on attention's scores is left to the reference attention"
    if not isclose(attention.scale, attention.head_dim**-0.5):
        return f"attention's scale of {attention.scale:g} is left to the reference attention"
    if attention.sinks:
        return "attention's sinks are left to the reference attention"
    if isinstance(layer.mlp, MoeSpec):
        return "experts are left to the reference operations"
    return None
