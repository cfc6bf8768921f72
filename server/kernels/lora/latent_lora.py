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
from loraplex.server.kernels.lora.record import a_at, b_at, ranks_at, record_of, scales_at
from loraplex.server.kernels.lora.table import LoraTable

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
    """An absorbed product of few tokens: each head's matrix, `[heads, in, out]`, of any strides,
    with LoRA or without."""

    weight: torch.Tensor
    lora: AbsorbedLora | None
    programmatic_launch: bool

    @property
    def blocks(self) -> tuple[int, int]:
        """Inputs of a program, all of a head's, and outputs."""
        inputs = triton.next_power_of_2(self.weight.shape[1])
        return inputs, max(16, _TILE // inputs)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of a kernel: the matrices and their strides, slots and adapters."""
        weight, lora = self.weight, self.lora
        if lora is None:
            return weight, *weight.stride(), weight, weight, weight, weight, 0, 0
        lora.table.check_site(lora.site)
        adapters = (*lora.table.tensors, lora.site, lora.table.num_sites)
        return weight, *weight.stride(), lora.slots, *adapters

    @property
    def switches(self) -> dict[str, Any]:
        """Constants of a kernel."""
        keys, values = (0, 0) if self.lora is None else self.lora.rows
        inputs, outputs = self.blocks
        return {
            "INPUTS": self.weight.shape[1],
            "OUTPUTS": self.weight.shape[2],
            "HEAD": keys + values,
            "KEYS": keys,
            "LORA": self.lora is not None,
            "BLOCK_I": inputs,
            "BLOCK_O": outputs,
            "BLOCK_R": _RANKS,
            "PDL": self.programmatic_launch,
            "launch_pdl": self.programmatic_launch,
        }


def absorbed_values(read: torch.Tensor, product: LatentProduct, out: torch.Tensor) -> None:
    """Compute heads' results of few tokens: `[tokens, heads, latent]` -> `[tokens, heads, values]`,
    both contiguous. One kernel."""
    tokens, heads, outputs = out.shape
    if tokens:
        _absorbed_values_kernel[(tokens, heads, triton.cdiv(outputs, product.blocks[1]))](
            read, out, *product.arguments, HEADS=heads, num_warps=4, **product.switches
        )


def add_latent_lora(
    x: torch.Tensor, y: torch.Tensor, lora: AbsorbedLora, part: Literal["keys", "values"]
) -> None:
    """Add what adapters change, in place. keys: x `[tokens, heads, rows.keys]` of queries, y
    `[tokens, heads, latent]`; values: x `[tokens, heads, latent]` of what was read, y `[tokens,
    heads, rows.values]`; the last dimension contiguous, in the adapters' dtype. One kernel. Raises
    ValueError for a site that the table has not.
    """
    slots, table, site, rows = lora
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
        addresses = (
            tl.load(a_at(words_ptr, record)).to(pointer),
            tl.load(b_at(words_ptr, record)).to(pointer),
        )
        i, o = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_O)
        source = x_ptr + token * strides_x[0] + head * strides_x[1] + i
        x = tl.load(source, mask=i < INPUTS, other=0.0).to(tl.float32)
        total = _low_rank(
            x, o, addresses, rank, head, INPUTS, OUTPUTS, HEAD, KEYS, OF_KEYS, BLOCK_R
        )
        to = y_ptr + token * strides_y[0] + head * strides_y[1] + o
        scale = tl.load(scales_at(floats_ptr, record))
        y = tl.load(to, mask=o < OUTPUTS, other=0.0).to(tl.float32) + scale * total
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=o < OUTPUTS)


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


@triton.jit
def absorbed_block(
    x_ptr: tl.tensor,
    to_ptr: tl.tensor,
    weight: tl.tuple,
    adapters: tl.tuple,
    slot_ptr: tl.tensor,
    head: tl.tensor,
    o: tl.tensor,
    factor: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Outputs o of one head of one token, times a factor. x_ptr, to_ptr: the head's. weight:
    address and strides; adapters: words, ints and floats of the table, site and number of sites;
    slot_ptr: the token's. The matrix is asked for before what the kernels before wrote is waited
    for."""
    i = tl.arange(0, BLOCK_I)
    weight_ptr, stride_head, stride_in, stride_out = weight
    at = weight_ptr + head.to(tl.int64) * stride_head
    at += i[:, None] * stride_in + o[None, :] * stride_out
    w = tl.load(at, mask=(i < INPUTS)[:, None] & (o < OUTPUTS)[None, :], other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + i, mask=i < INPUTS, other=0.0).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * x[:, None], axis=0)
    if LORA:
        words_ptr, ints_ptr, floats_ptr, site, num_sites = adapters
        slot = tl.load(slot_ptr)
        record = record_of(slot, site, num_sites)
        rank = tl.where(slot >= 0, tl.load(ranks_at(ints_ptr, record)), 0)
        pointer = tl.pointer_type(x_ptr.dtype.element_ty)
        addresses = (
            tl.load(a_at(words_ptr, record)).to(pointer),
            tl.load(b_at(words_ptr, record)).to(pointer),
        )
        total += tl.load(scales_at(floats_ptr, record)) * _low_rank(
            x, o, addresses, rank, head, INPUTS, OUTPUTS, HEAD, KEYS, OF_KEYS, BLOCK_R
        )
    tl.store(to_ptr + o, (total * factor).to(to_ptr.dtype.element_ty), mask=o < OUTPUTS)


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _absorbed_values_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes some outputs of one head of one token."""
    let_next_start(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * HEADS + head
    absorbed_block(
        x_ptr + row * INPUTS, y_ptr + row * OUTPUTS,
        (weight_ptr, stride_head, stride_in, stride_out),
        (words_ptr, ints_ptr, floats_ptr, site, num_sites), slots_ptr + token, head,
        tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O), 1.0,
        INPUTS, OUTPUTS, HEAD, KEYS, False, LORA, BLOCK_I, BLOCK_R, PDL,
    )  # fmt: skip
