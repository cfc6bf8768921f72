"""The effect of an adapter on the base's own product: DoRA's lengths, and biases."""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.lora.table import VectorTable

_BLOCK = 1024


def scale_outputs(y: torch.Tensor, slots: torch.Tensor, table: VectorTable, site: int) -> None:
    """Apply adapters' factors and addends to the base's output: `y = factor * y + addend` in place,
    in rows whose adapter has these of the site.

    y: `[rows, out_features]`, of the base alone, contiguous. slots: int32 `[rows]`, -1 = no
    adapter. In float32; one kernel, no allocation. Raises ValueError on a mismatch.
    """
    rows, features = y.shape
    if not y.is_contiguous():
        raise ValueError(f"a product must be contiguous: {list(y.shape)}, {y.stride()}")
    if slots.shape != (rows,) or slots.dtype != torch.int32:
        raise ValueError(f"slots must be int32 [{rows}], got {slots.dtype} {list(slots.shape)}")
    table.check_site(site)
    if rows:
        _scale_outputs_kernel[(rows * triton.cdiv(features, _BLOCK),)](
            y, slots, table.words, site, table.num_sites, features, BLOCK=_BLOCK
        )


@triton.jit(
    do_not_specialize=["site", "num_sites", "features"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _scale_outputs_kernel(
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    words_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    blocks = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        address = tl.load(words_ptr + slot * num_sites + site)
        if address != 0:
            n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = n < features
            vectors = address.to(tl.pointer_type(tl.float32))
            factor = tl.load(vectors + n, mask=inside, other=0.0)
            addend = tl.load(vectors + features + n, mask=inside, other=0.0)
            at = y_ptr + row * features + n
            y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, (y * factor + addend).to(y_ptr.dtype.element_ty), mask=inside)
