"""Kernels compiled many at once, before any of them is launched."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_MOST_THREADS = 16  # each takes some 100 MB


@contextmanager
def compiled_together() -> Iterator[None]:
    """Launches within compute nothing: what they would launch is compiled on all cores, and when
    the context ends it is there. So what kernels should have written is whatever was there.

    Of the whole process: nothing else may launch kernels meanwhile. Raises what compilation does.
    """
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with (
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool),
        _not_launched(InterpretedFunction if triton.knobs.runtime.interpret else JITFunction),
    ):
        yield


@contextmanager
def _not_launched(kind: Any) -> Iterator[None]:
    run = kind.run

    def ask(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    kind.run = ask
    try:
        yield
    finally:
        kind.run = run
