"""Short ways to look at slab files."""

from contextlib import closing
from pathlib import Path

from adapters.manifest import SlabLayout
from adapters.pack import SlabFile


def read_layout(path: Path) -> SlabLayout:
    with closing(SlabFile(path)) as slab:
        return slab.layout


def read_payload(path: Path) -> bytes:
    """Its runs one after the other."""
    with closing(SlabFile(path)) as slab:
        layout = slab.layout
        memory = bytearray(layout.nbytes)
        slab.copy_runs(memoryview(memory), [sum(layout.runs[:i]) for i in range(len(layout.runs))])
    return bytes(memory)


def closed(slab: SlabFile) -> Path:
    """Closes it; where it lies."""
    slab.close()
    return slab.path
