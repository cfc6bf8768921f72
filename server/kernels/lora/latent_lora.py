"""The product that attention to latents absorbs, `kv_b`, in queries and in results: its LoRA, and
all of it for few tokens.

`W + scale * B A` makes of a latent each head's key and value. A head's query `q` meets latents as
`q W`, plus `scale * (q B) A`; what the head read of latents, `o`, becomes `W o`, plus
`scale * B (A o)`. B is the head's part, of keys or of values.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import let_next_start, wait
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.tiles import a_at, b_at, ranks_at, record_of, scales_at

_RANKS = 16
# With more tokens the library's batched product reads less.
MOST_ABSORBED = 8
# Numbers of a head's matrix that a program takes at once.
_TILE = 8192


class HeadRows(NamedTuple):
    """Rows of B that belong to one head, keys first. keys, values: how many of each."""

    keys: int
    values: int


class AbsorbedLora(NamedTuple):
    """LoRA of an absorbed product in a batch. slots: int32 `[tokens]`, -1 = no adapter. site: of
    one projection."""

    slots: torch.Tensor
    table: LoraTable
    site: int
    rows: HeadRows


class LatentProduct(NamedTuple):
    """An absorbed product: each head's matrix, `[heads, in, out]`, of any strides, for few tokens;
    None = LoRA alone, of any number. lora: None = without."""

    weight: torch.Tensor | None
    lora: AbsorbedLora | None
    programmatic_launch: bool = False

    def arguments(self, stand_in: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of a kernel: the matrices and their strides, slots and adapters. stand_in: for
        what there is not. Raises ValueError for a site that the table has not."""
        weight, lora = self.weight, self.lora
        matrices = (stand_in, 0, 0, 0) if weight is None else (weight, *weight.stride())
        if lora is None:
            return *matrices, *[stand_in] * 4, 0, 0
        lora.table.check_site(lora.site)
        adapters = (*lora.table.tensors, lora.site, lora.table.num_sites)
        return *matrices, lora.slots, *adapters

    def switches(self, inputs: int, outputs: int) -> dict[str, Any]:
        """Constants of a kernel. inputs, outputs: of a head."""
        keys, values = (0, 0) if self.lora is None else self.lora.rows
        block = triton.next_power_of_2(inputs)
        most = triton.next_power_of_2(outputs)
        return {
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            "HEAD": keys + values,
            "KEYS": keys,
            "BASE": self.weight is not None,
            "LORA": self.lora is not None,
            "BLOCK_I": block,
            "BLOCK_O": most if self.weight is None else max(16, _TILE // block),
            "BLOCK_R": _RANKS,
            "PDL": self.programmatic_launch,
            "launch_pdl": self.programmatic_launch,
        }


def absorb(
    x: torch.Tensor, y: torch.Tensor, product: LatentProduct, part: Literal["keys", "values"]
) -> None:
    """Compute an absorbed product, or add what adapters change, in place. keys: x `[tokens, heads,
    rows.keys]` of queries, y `[tokens, heads, latent]`; values: x `[tokens, heads, latent]` of what
    was read, y `[tokens, heads, rows.values]`; the last dimension contiguous, in the adapters'
    dtype. One kernel.
    """
    tokens, heads, inputs = x.shape
    outputs = y.shape[2]
    switches = product.switches(inputs, outputs)
    if tokens:
        _absorb_kernel[(tokens, heads, triton.cdiv(outputs, switches["BLOCK_O"]))](
            x,
            y,
            (x.stride(0), x.stride(1)),
            (y.stride(0), y.stride(1)),
            *product.arguments(x),
            OF_KEYS=part == "keys",
            num_warps=4,
            **switches,
        )


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _absorb_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    strides_x: tl.tuple,
    strides_y: tl.tuple,
    weight_ptr: tl.tensor,
    stride_head: tl.tensor,
    stride_in: tl.tensor,
    stride_out: tl.tensor,
    slots_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BASE: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes some outputs of one head of one token."""
    let_next_start(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    to_ptr = y_ptr + token * strides_y[0] + head * strides_y[1] + o
    total, live = absorb_block(
        x_ptr + token * strides_x[0] + head * strides_x[1], to_ptr,
        (weight_ptr, stride_head, stride_in, stride_out),
        (words_ptr, ints_ptr, floats_ptr, site, num_sites), slots_ptr + token, head, o,
        INPUTS, OUTPUTS, HEAD, KEYS, OF_KEYS, BASE, LORA, BLOCK_I, BLOCK_R, PDL,
    )  # fmt: skip
    tl.store(to_ptr, total.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def absorb_block(
    x_ptr: tl.tensor,
    to_ptr: tl.tensor,
    weight: tl.tuple,
    adapters: tl.tuple,
    slot_ptr: tl.tensor,
    head: tl.tensor,
    o: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BASE: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> tuple[Any, Any]:
    """Outputs o of one head of one token, float32, and which of them are to be written. x_ptr: the
    head's; to_ptr: of each o. weight: address and strides; adapters: words, ints and floats of the
    table, site and number of sites; slot_ptr: the token's. The matrix is asked for before what the
    kernels before wrote is waited for. Without BASE the outputs are what lies at to_ptr and LoRA,
    and nothing is read where no adapter is."""
    i = tl.arange(0, BLOCK_I)
    taken, live = i < INPUTS, o < OUTPUTS
    if BASE:
        weight_ptr, stride_head, stride_in, stride_out = weight
        at = weight_ptr + head.to(tl.int64) * stride_head
        at += i[:, None] * stride_in + o[None, :] * stride_out
        w = tl.load(at, mask=taken[:, None] & live[None, :], other=0.0)
    wait(PDL)
    if LORA:
        words_ptr, ints_ptr, floats_ptr, site, num_sites = adapters
        slot = tl.load(slot_ptr)
        record = record_of(slot, site, num_sites)
        rank = tl.where(slot >= 0, tl.load(ranks_at(ints_ptr, record)), 0)
        if not BASE:
            taken, live = taken & (rank > 0), live & (rank > 0)
    x = tl.load(x_ptr + i, mask=taken, other=0.0).to(tl.float32)
    if BASE:
        total = tl.sum(w.to(tl.float32) * x[:, None], axis=0)
    else:
        total = tl.load(to_ptr, mask=live, other=0.0).to(tl.float32)
    if LORA:
        pointer = tl.pointer_type(x_ptr.dtype.element_ty)
        addresses = (
            tl.load(a_at(words_ptr, record)).to(pointer),
            tl.load(b_at(words_ptr, record)).to(pointer),
        )
        total += tl.load(scales_at(floats_ptr, record)) * _low_rank(
            x, o, addresses, rank, head, INPUTS, OUTPUTS, HEAD, KEYS, OF_KEYS, BLOCK_R
        )
    return total, live


@triton.jit
def _low_rank(
    x: tl.tensor,
    o: tl.tensor,
    addresses: tl.tuple,
    rank: tl.tensor,
    head: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> Any:
    """Outputs o of LoRA without its scale, float32 as o. x: float32, inputs of one head. addresses:
    of A and B."""
    a_ptr, b_ptr = addresses
    i = tl.arange(0, x.shape[0])[None, :]
    o = o[None, :]
    total = tl.zeros((o.shape[1],), tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)[:, None]
        if OF_KEYS:
            into, out = b_ptr + (head * HEAD + i) * rank + r, a_ptr + r * OUTPUTS + o
        else:
            into, out = a_ptr + r * INPUTS + i, b_ptr + (head * HEAD + KEYS + o) * rank + r
        shrunk = tl.load(into, mask=(i < INPUTS) & (r < rank), other=0.0).to(tl.float32)
        low = tl.sum(shrunk * x[None, :], axis=1)[:, None]
        wide = tl.load(out, mask=(o < OUTPUTS) & (r < rank), other=0.0).to(tl.float32)
        total += tl.sum(low * wide, axis=0)
    return total
