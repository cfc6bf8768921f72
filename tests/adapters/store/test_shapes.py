"""Adapters whose config and header were judged before."""

from pathlib import Path

from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import small_base, write_adapter
from tests.slab_files import read_payload, save_slab

BASE = small_base()


def test_adapters_of_one_shape_have_their_own_slabs(tmp_path: Path) -> None:
    """Shapes are known again; those that differ in anything but values are judged anew."""
    wide = write_adapter(tmp_path / "in" / "wide", BASE, rank=4)
    for number in (1, 2):
        write_adapter(tmp_path / "in" / f"alike{number}", BASE, seed=number)
    store = AdapterStore(tmp_path / "store", BASE, {"local": LocalSource([tmp_path / "in"])})
    found = [
        store.admit(AdapterRef("local", name), None) for name in ("alike1", wide.name, "alike2")
    ]
    fresh = AdapterStore(tmp_path / "fresh", BASE, {"local": LocalSource([tmp_path / "in"])})
    assert [fresh.admit(AdapterRef("local", "alike2"), None)] == found[2:]
    slabs = [read_payload(save_slab(store, one.digest, "float32", 4096)) for one in found]
    assert len(set(slabs)) == 3
    assert slabs[2] == read_payload(save_slab(fresh, found[2].digest, "float32", 4096))
