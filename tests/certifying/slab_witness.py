"""A check of the host's slabs, for the certifying executor."""

from collections import OrderedDict
from hashlib import blake2b

from loraplex.server.engine.executor import AdapterCopy

MAX_REMEMBERED = 65_536


class SlabWitness:
    """A check that one digest never stands for two contents.

    It does not know which bytes are right. It notices that an adapter's bytes differ from before.
    arena: the host's, from which slabs are copied.
    """

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena
        self._seen: OrderedDict[str, bytes] = OrderedDict()

    def problem(self, copy: AdapterCopy) -> str | None:
        """Reason why the bytes in the host arena are not this adapter's, or None."""
        found = self._checksum(copy)
        known = self._seen.setdefault(copy.layout.digest, found)
        self._seen.move_to_end(copy.layout.digest)
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
        return None if found == known else "the slab's bytes differ from those that it had before"

    def _checksum(self, copy: AdapterCopy) -> bytes:
        size = copy.layout.extent_bytes
        checksum = blake2b(digest_size=16)
        for first, run in zip(copy.host_extents, copy.layout.all_runs, strict=True):
            checksum.update(self._arena[first * size : (first + run) * size])
        return checksum.digest()
