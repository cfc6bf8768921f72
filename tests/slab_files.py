"""Short ways to look at slab files."""

from contextlib import closing
from pathlib import Path

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.content_check import Seal, seal_of
from loraplex.adapters.manifest import SlabDtype, SlabLayout
from loraplex.adapters.peft.lora_tensors import LoraTensors
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.slab.file import SlabFile, write_slab_file
from loraplex.adapters.slab.memory import SlabMemory, one_after_another
from loraplex.adapters.slab.pack import SlabPlan, pack_weights, plan_moves
from loraplex.adapters.store.store import AdapterStore


def read_layout(path: Path) -> SlabLayout:
    with closing(SlabFile(path)) as slab:
        return slab.layout


def read_payload(path: Path) -> bytes:
    """Its runs one after the other."""
    with closing(SlabFile(path)) as slab:
        layout = slab.layout
        memory = bytearray(layout.nbytes)
        slab.copy_runs(memoryview(memory), one_after_another(layout))
    return bytes(memory)


def write_slab(
    weights: Path, adapter: LoraTensors, base: BaseSpec, layout: SlabLayout, target: Path
) -> None:
    """Packs a safetensors file, whatever it holds."""
    memory = memoryview(bytearray(b"\xee") * layout.nbytes)
    places = one_after_another(layout)
    with open_weights(weights) as file:
        tensors = sorted(adapter.tensors, key=lambda tensor: tensor.start)
        seal = Seal(file.identity(), seal_of(file, tensors)[0])
        plan = SlabPlan(layout, plan_moves(adapter, base, layout))
        pack_weights(file, adapter, base, plan, SlabMemory(layout, memory, places), seal)
    write_slab_file(target, layout, memory, places)


def save_slab(store: AdapterStore, digest: str, dtype: SlabDtype, extent_bytes: int) -> Path:
    """Packs an adapter and keeps it packed; where its file lies."""
    with closing(store.open_slab(digest, dtype, extent_bytes)) as source:
        layout = source.layout
        memory = memoryview(bytearray(b"\xee") * layout.nbytes)
        source.copy_runs(memory, one_after_another(layout))
    assert store.save_slab(layout, memory, one_after_another(layout))
    return slab_path(store, digest, dtype, extent_bytes)


def slab_path(store: AdapterStore, digest: str, dtype: SlabDtype, extent_bytes: int) -> Path:
    """Of a slab that is kept."""
    with closing(store.open_slab(digest, dtype, extent_bytes)) as slab:
        assert isinstance(slab, SlabFile)
        return slab.path
