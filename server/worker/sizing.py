"""Arithmetic of a worker's start: dtype of slabs and size of extents. Pure."""

from typing import Literal

from adapters.base import BaseSpec
from adapters.manifest import SlabDtype

DTYPE_BYTES: dict[SlabDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
MIN_EXTENT = 64 << 10
MAX_EXTENT = 4 << 20
# An extent holds the largest B of an adapter of this rank.
TYPICAL_LORA_RANK = 16
# An arena is cut into at least so many extents, however small it is.
MIN_EXTENTS = 64


def choose_dtype(
    asked: Literal["auto", "float32", "float16", "bfloat16"],
    device: Literal["cpu", "cuda"],
    checkpoint: str | None,
    has_bfloat16: bool,
) -> SlabDtype:
    """dtype of weights, activations and slabs. checkpoint: the dtype in the model's config.json."""
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    if checkpoint == "float16":
        return "float16"
    return "bfloat16" if has_bfloat16 else "float16"


def choose_extent_bytes(base: BaseSpec, dtype: SlabDtype, adapter_memory: int) -> int:
    """Bytes of an extent: a power of two in 64 KiB .. 4 MiB.

    Tensors above one extent need a contiguous run, and what a tensor leaves free of an extent is
    lost; so it is the smallest that holds the largest layer tensor of an adapter of rank 16 (of
    Llama-3.1-8B in bf16: 512 KiB). A small arena gets smaller extents, so as to hold many adapters.
    """
    widest = max(
        max(module.in_features, module.out_features) for module in base.layer_modules.values()
    )
    largest_tensor = widest * TYPICAL_LORA_RANK * DTYPE_BYTES[dtype]
    extent = MIN_EXTENT
    while extent < min(largest_tensor, MAX_EXTENT) and extent * 2 * MIN_EXTENTS <= adapter_memory:
        extent *= 2
    return extent
