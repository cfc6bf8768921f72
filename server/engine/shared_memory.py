"""The host arena's mapping, as the shell and the engine both have it."""

import mmap
from contextlib import suppress


def map_shared(fd: int, nbytes: int) -> memoryview:
    """The memory file's bytes, writable; in huge pages where the system lends them to who asks
    (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`: advise), as filling and pinning gigabytes
    page by page takes long."""
    if not nbytes:
        return memoryview(b"")
    mapped = mmap.mmap(fd, nbytes)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)
