"""The host arena's mapping, as the shell and the engine both have it."""

import fcntl
import mmap
import os
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


class HostMemory:
    """Anonymous memory of a fixed size that an engine process can map by its descriptor."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("loraplex-adapters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.view = map_shared(self.fd, nbytes)
