"""Programmatic dependent launch: a kernel is set up while the one before it still drains."""

import triton
import triton.language as tl


@triton.jit
def follow(PDL: tl.constexpr) -> None:
    """First in a kernel launched with `launch_pdl=PDL`: let the next one be set up, and wait until
    what the ones before wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
