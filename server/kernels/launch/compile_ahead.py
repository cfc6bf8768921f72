"""Kernels compiled many at once, before any of them is launched."""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

_MOST_THREADS = 16  # each takes some 100 MB


@contextmanager
def compiled_together() -> Iterator[None]:
    """Launches within compute nothing: what they would launch is compiled on all cores, and when
    the context ends it is there. So what kernels should have written is whatever was there.

    Of the whole process: nothing else may launch kernels meanwhile. Raises what a compilation
    raised, once the others have ended.
    """
    with (
        _Compilations(min(len(os.sched_getaffinity(0)), _MOST_THREADS)) as compilations,
        # With some versions nothing can be compiled any more after an error that it raises itself.
        triton.AsyncCompileMode(compilations, ignore_errors=True),
        _not_launched(InterpretedFunction if triton.knobs.runtime.interpret else JITFunction),
    ):
        yield
    compilations.raise_first()


def tell_of_late_kernels() -> None:
    """Log each kernel that is compiled or loaded from now on: it holds up a step, and should have
    been warm."""

    def late(*, src: Any, cache_hit: bool, **_: object) -> None:
        done = "loaded" if cache_hit else "compiled"
        log.warning(
            "a kernel was %s while serving: %s %s %s", done, src.name, src.signature, src.constants
        )

    # Triton's hook of a launch writes constants as JSON, and raises where one holds a dtype.
    triton.knobs.compilation.listener = late


class _Compilations(ThreadPoolExecutor):
    """Remembers what it was given."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        self._futures.append(super().submit(function, *args, **options))
        return self._futures[-1]

    def raise_first(self) -> None:
        for future in self._futures:
            future.result()


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
