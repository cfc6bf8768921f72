"""A kernel that cannot be compiled, beside one that can."""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.compile_ahead import compiled_together
from tests.kernels.compile_all import compile_for


@triton.jit
def _fill_kernel(x_ptr: tl.tensor, N: tl.constexpr) -> None:
    tl.store(x_ptr + tl.arange(0, N), 1.0)


@triton.jit
def _broken_kernel(x_ptr: tl.tensor, N: tl.constexpr) -> None:
    tl.store(x_ptr + tl.arange(0, N), tl.zeros((2 * N,), tl.float32))


def main() -> None:
    compiled, x = compile_for(90), torch.zeros(16)
    try:
        with compiled_together():
            _broken_kernel[(1,)](x, N=16)
            _fill_kernel[(1,)](x, N=16)
    except triton.CompilationError as error:
        print(type(error).__name__, *compiled)
    with compiled_together():
        _fill_kernel[(1,)](x, N=8)
    print(*compiled)


if __name__ == "__main__":
    main()
