"""Threads with stacks for llguidance, which goes as deep as a grammar does."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from llguidance import LLExecutor

# Address space, not memory. Grammars within their limits need less than a third of it.
STACK_BYTES = 256 << 20
_changing_size = threading.Lock()

T = TypeVar("T")


class DeepThreads(ThreadPoolExecutor):
    """A pool of threads, each with a stack of STACK_BYTES."""

    def _adjust_thread_count(self) -> None:
        with _changing_size:
            before = threading.stack_size(STACK_BYTES)
            try:
                super()._adjust_thread_count()
            finally:
                threading.stack_size(before)


def deep_executor(threads: int) -> LLExecutor:
    """llguidance's own threads, each with such a stack. They read its size from the environment."""
    os.putenv("RUST_MIN_STACK", str(STACK_BYTES))
    return LLExecutor(threads)


def run_deep(function: Callable[[], T]) -> T:
    """Calls a function on a thread of its own, with such a stack."""
    with DeepThreads(1) as threads:
        answer: Future[T] = threads.submit(function)
        return answer.result()
