"""LoRA of a product that attention to latents absorbs: of `kv_b`, in queries and in results.

`W + scale * B A` makes of a latent each head's key and value. A head's query `q` meets latents as
`q W`, plus `scale * (q B) A`; what the head read of latents, `o`, becomes `W o`, plus
`scale * B (A o)`. B is the head's part, of keys or of values.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.lora.record import a_at, b_at, ranks_at, record_of, scales_at
from loraplex.server.kernels.lora.table import LoraTable

_RANKS = 16


class HeadRows(NamedTuple):
    """Rows of B that belong to one head, keys first. keys, values: how many of each."""

    keys: int
    values: int


def add_latent_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    slots: torch.Tensor,
    table: LoraTable,
    site: int,
    rows: HeadRows,
    part: Literal["keys", "values"],
) -> None:
    """Add what adapters change, in place. keys: x `[tokens, heads, rows.keys]` of queries, y
    `[tokens, heads, latent]`; values: x `[tokens, heads, latent]` of what was read, y `[tokens,
    heads, rows.values]`; the last dimension contiguous, in the adapters' dtype. slots: int32
    `[tokens]`, -1 = no adapter. site: of one projection. One kernel. Raises ValueError for a site
    that the table has not.
    """
    table.check_site(site)
    tokens, heads, inputs = x.shape
    outputs = y.shape[2]
    if tokens:
        _latent_lora_kernel[(tokens, heads)](
            x,
            y,
            slots,
            *table.tensors,
            site,
            table.num_sites,
            (x.stride(0), x.stride(1)),
            (y.stride(0), y.stride(1)),
            INPUTS=inputs,
            OUTPUTS=outputs,
            HEAD=rows.keys + rows.values,
            KEYS=rows.keys,
            OF_KEYS=part == "keys",
            BLOCK_I=triton.next_power_of_2(inputs),
            BLOCK_O=triton.next_power_of_2(outputs),
            BLOCK_R=_RANKS,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _latent_lora_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    strides_x: tl.tuple,
    strides_y: tl.tuple,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """A program takes one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    record = record_of(slot, site, num_sites)
    rank = tl.load(ranks_at(ints_ptr, record))
    if (slot >= 0) & (rank > 0):
        pointer = tl.pointer_type(x_ptr.dtype.element_ty)
        a_ptr = tl.load(a_at(words_ptr, record)).to(pointer)
        b_ptr = tl.load(b_at(words_ptr, record)).to(pointer)
        i, o = tl.arange(0, BLOCK_I)[None, :], tl.arange(0, BLOCK_O)[None, :]
        source = x_ptr + token * strides_x[0] + head * strides_x[1] + i
        x = tl.load(source, mask=i < INPUTS, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_O,), tl.float32)
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)[:, None]
            if OF_KEYS:
                into, out = b_ptr + (head * HEAD + i) * rank + r, a_ptr + r * OUTPUTS + o
            else:
                into, out = a_ptr + r * INPUTS + i, b_ptr + (head * HEAD + KEYS + o) * rank + r
            shrunk = tl.load(into, mask=(i < INPUTS) & (r < rank), other=0.0).to(tl.float32)
            low = tl.sum(shrunk * x, axis=1)[:, None]
            wide = tl.load(out, mask=(o < OUTPUTS) & (r < rank), other=0.0).to(tl.float32)
            total += tl.sum(low * wide, axis=0)
        to = y_ptr + token * strides_y[0] + head * strides_y[1] + tl.arange(0, BLOCK_O)
        live = tl.arange(0, BLOCK_O) < OUTPUTS
        scale = tl.load(scales_at(floats_ptr, record))
        y = tl.load(to, mask=live, other=0.0).to(tl.float32) + scale * total
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=live)
