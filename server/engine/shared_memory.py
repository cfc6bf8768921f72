"""Large host memory: that of the host arena and of patches, which the worker and the engine both
map, and an engine's own."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np

from loraplex.server.engine.begun import BegunSequences

# What a thread touches at a time.
_TOUCHED_BYTES = 256 << 20


def map_shared(fd: int, nbytes: int) -> memoryview:
    """The memory file's bytes, writable. fd: -1 = memory of no file, of this process alone.

    Huge pages are requested, because filling and pinning gigabytes of small pages takes long. The
    system grants them where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise`.
    """
    if not nbytes:
        return memoryview(b"")
    mapped = mmap.mmap(fd, nbytes)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


@contextmanager
def pages_made(memory: memoryview, threads: int) -> Iterator[None]:
    """Make the system allocate every page of `memory` while the body of the `with` runs.

    All pages are allocated at the end, unless the body raises. Pages are only read, so others may
    write meanwhile. Pinning allocates missing pages one after the other, which takes seconds for
    each 10 GB; several threads are faster.
    """
    pool = ThreadPoolExecutor(threads, "page-maker")
    try:
        for first in range(0, len(memory), _TOUCHED_BYTES):
            pages = np.frombuffer(memory[first : first + _TOUCHED_BYTES], np.uint8)
            pool.submit(pages[:: mmap.PAGESIZE].max)
        yield
        pool.shutdown()
    finally:
        pool.shutdown(cancel_futures=True)


def begun_in(memory: memoryview) -> BegunSequences:
    """Find what is begun in all of a `HostMemory`'s file."""
    return BegunSequences(memory[-BegunSequences.NBYTES :])


class HostMemory:
    """Anonymous memory of a fixed size that an engine process can map by its descriptor. It takes
    room of the machine where it was touched.

    begun: behind the `nbytes` of `view`, at the file's end.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("loraplex-adapters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + BegunSequences.NBYTES
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        whole = map_shared(self.fd, size)
        self.view, self.begun = whole[:nbytes], begun_in(whole)

    def make(self, begin: int, nbytes: int) -> None:
        """Take the machine's memory for a range. Raises OSError when there is none."""
        os.posix_fallocate(self.fd, begin, nbytes)

    def give_back(self, begin: int, nbytes: int) -> None:
        """Give a range, from a page on, back to the machine, which may forget what is there."""
        memory = self.view.obj
        assert isinstance(memory, mmap.mmap)
        with suppress(OSError):  # a system that cannot keeps it for the next use
            memory.madvise(mmap.MADV_REMOVE, begin, nbytes)
