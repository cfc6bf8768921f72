"""Slab files whose every payload byte names their adapter."""

from pathlib import Path

from loraplex.adapters.manifest import SiteLayout, SlabLayout
from loraplex.adapters.slab import file as slab_file
from loraplex.adapters.slab.file import SlabFile

EXTENT = 4096


# A site with lengths, which a device has to make something of.
UNFINISHED = SiteLayout(0, "down", (1,), (1.0,), 0, (0,), vectors=(1,))


def write_slab_file(
    path: Path, digest: str, extents: int, sites: tuple[SiteLayout, ...] = ()
) -> None:
    """A slab of one-extent runs. digest: one character, or the same many times."""
    layout = SlabLayout(digest, "base", "float32", EXTENT, (1,) * extents, sites)
    payload = bytearray((digest.encode() * layout.nbytes)[: layout.nbytes])
    slab_file.write_slab_file(path, layout, memoryview(payload), range(extents))


class Packing:
    """A slab that no file holds, as far as the worker knows."""

    on_disk = False

    def __init__(self, slab: SlabFile) -> None:
        self.layout = slab.layout
        self.copy_runs = slab.copy_runs
        self.close = slab.close
