"""Processes that hold thousands of adapters are not held up by them."""

import gc
import subprocess
import sys

import msgspec

from loraplex.adapters.errors import Findings
from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.lora_tensors import LoraTensors, ModuleLora
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.slab.layout import make_layout
from tests.adapter_folders import ALL_PROJECTIONS, small_base

_ADAPTERS = 20
_EMPTY = TensorInfo("x", "F32", (0,), 0, 0)
_TOLD = """
import gc, sys
from loraplex.adapters.common.pauses import shorten_pauses
before = len(gc.get_objects())
shorten_pauses()
print(before, gc.get_freeze_count(), gc.get_threshold()[0], sys.getswitchinterval())
"""
# Twice at once: collections are held off until both are over.
_BUILT = """
import gc
from loraplex.adapters.common.pauses import full_collections, shorten_pauses
shorten_pauses()
gc.set_threshold(50, 5, 5)
def full():
    before = gc.get_stats()[2]["collections"]
    kept = [[[]] for _ in range(50_000)]
    return gc.get_stats()[2]["collections"] - before
beside = full()
with full_collections.held_off():
    with full_collections.held_off():
        pass
    meanwhile = full()
print(beside, meanwhile, full(), gc.get_threshold() == (50, 5, 5))
"""


def _layout_on_the_wire() -> bytes:
    base = small_base(num_layers=8)
    config = parse_config(b'{"peft_type": "LORA", "target_modules": ["x"]}', Findings())
    assert config is not None
    modules = tuple(
        ModuleLora(layer, name, 4, 1.0, _EMPTY, _EMPTY)
        for layer in range(base.num_layers)
        for name in ALL_PROJECTIONS
    )
    layout = make_layout(LoraTensors(config, modules), base, "0" * 64, "float32", 4096)
    return msgspec.msgpack.encode(layout)


def test_layouts_give_collections_nothing_to_look_at() -> None:
    wire = _layout_on_the_wire()
    decode = msgspec.msgpack.Decoder(SlabLayout).decode
    decode(wire)
    gc.collect()
    before = len(gc.get_objects())
    kept = [decode(wire) for _ in range(_ADAPTERS)]
    gc.collect()  # finds tuples of numbers, and lets them be from then on
    more = len(gc.get_objects()) - before
    assert len(kept[0].sites) > 8
    assert more < 3 * _ADAPTERS


def test_a_process_shortens_its_pauses() -> None:
    told = subprocess.run([sys.executable, "-c", _TOLD], capture_output=True, text=True, check=True)
    objects, frozen, young, switch_s = told.stdout.split()
    assert int(frozen) > 0.5 * int(objects)
    assert int(young) > 700
    assert float(switch_s) < 0.005


def test_work_that_builds_much_has_no_collection_of_all_objects() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _BUILT], capture_output=True, text=True, check=True
    )
    beside, meanwhile, after, restored = told.stdout.split()
    assert int(beside) > 0
    assert int(meanwhile) == 0
    assert int(after) > 0
    assert restored == "True"
