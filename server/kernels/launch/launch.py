"""Shared parts of launches: the precision of products, and programmatic dependent launch.

By the latter a kernel is set up while the one before it still drains.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl


def dot_precision(dtype: torch.dtype) -> Literal["ieee", "tf32"]:
    """The precision of `dot`: float32 is not rounded. For other types it is of no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def let_next_start(PDL: tl.constexpr) -> None:
    """As soon as all programs of this kernel have begun."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr) -> None:
    """Until what the kernels before wrote can be read, and what they read be written."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def follow(PDL: tl.constexpr) -> None:
    """First in a kernel launched with `launch_pdl=PDL`: let the next one be set up, and wait until
    what the ones before wrote can be read."""
    let_next_start(PDL)
    wait(PDL)


@triton.jit
def load_first(ptr: tl.tensor, PDL: tl.constexpr) -> Any:
    """The first thing that a kernel reads of what the ones before wrote: waits for them."""
    wait(PDL)
    return tl.load(ptr)


@triton.jit
def still_to_come(values: tl.tensor, PDL: tl.constexpr) -> Any:
    """values, of 16 bits, here where they are needed: a compiler that saw that tensor cores take
    them would bring them to shared memory where they were asked for, and wait for them there."""
    if PDL and values.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )
    else:
        return values
