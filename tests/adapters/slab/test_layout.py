"""Layout arithmetic as properties."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.base import LAYER_SITES, BaseSpec, LayerModules, ModuleShape, layer_stem
from loraplex.adapters.errors import Findings
from loraplex.adapters.manifest import ITEM_BYTES, SlabDtype, SlabLayout
from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.lora_tensors import LoraTensors, ModuleLora
from loraplex.adapters.peft.validate import SlabRoom
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.slab.layout import (
    ALIGNMENT,
    PlacedMatrix,
    a_matrix,
    b_matrices,
    make_layout,
    room_problem,
)
from tests.adapter_folders import ALL_PROJECTIONS, small_base

BASE = small_base(num_layers=3)
_CONFIG = parse_config(b'{"peft_type": "LORA", "target_modules": ["x"]}', Findings())
_EMPTY = TensorInfo("x", "F32", (0,), 0, 0)


@dataclass(frozen=True)
class Piece:
    """A matrix of the slab and its place."""

    start: int
    end: int

    @classmethod
    def of(cls, matrix: PlacedMatrix) -> "Piece":
        return cls(matrix.offset, matrix.offset + matrix.nbytes)


def adapter(ranks: dict[tuple[int, str], int]) -> LoraTensors:
    assert _CONFIG is not None
    modules = [
        ModuleLora(layer, name, r, 0.5, _EMPTY, _EMPTY) for (layer, name), r in ranks.items()
    ]
    return LoraTensors(_CONFIG, tuple(modules))


def pieces(layout: SlabLayout, base: BaseSpec) -> list[Piece]:
    item = ITEM_BYTES[layout.dtype]
    found = []
    for site in layout.sites:
        found.append(Piece.of(a_matrix(site, base, item)))
        found += [Piece.of(matrix) for matrix in b_matrices(site, base, item) if matrix]
    return found


KEYS = st.one_of(
    st.tuples(st.integers(0, BASE.num_layers - 1), st.sampled_from(ALL_PROJECTIONS)),
    st.tuples(st.just(-1), st.sampled_from(["embed_tokens", "lm_head"])),
)
RANKS = st.dictionaries(KEYS, st.integers(1, 40), min_size=1, max_size=24)
DTYPES: st.SearchStrategy[SlabDtype] = st.sampled_from(("float32", "bfloat16"))


@settings(max_examples=300)
@given(RANKS, DTYPES, st.integers(1, 40).map(lambda n: n * ALIGNMENT))
def test_rules_of_a_slab(ranks: dict[tuple[int, str], int], dtype: SlabDtype, extent: int) -> None:
    layout = make_layout(adapter(ranks), BASE, "d", dtype, extent)
    found = sorted(pieces(layout, BASE), key=lambda piece: piece.start)
    for before, after in zip(found, found[1:], strict=False):
        assert before.end <= after.start, "overlap"
    assert found[-1].end <= layout.nbytes == sum(layout.runs) * extent
    borders = {sum(layout.runs[:index]) * extent: run for index, run in enumerate(layout.runs)}
    for piece in found:
        assert piece.start % ALIGNMENT == 0
        if piece.end - piece.start > extent:
            assert borders[piece.start] * extent >= piece.end - piece.start
            assert (borders[piece.start] - 1) * extent < piece.end - piece.start
            inside = range(piece.start, piece.start + borders[piece.start] * extent)
            assert [other for other in found if other.start in inside] == [piece]
        else:
            assert piece.start // extent == (piece.end - 1) // extent, "crosses a border"
    assert sum(map(sum, (site.ranks for site in layout.sites))) == sum(ranks.values())


@settings(max_examples=50)
@given(RANKS)
def test_every_run_is_used_and_sites_follow_the_order_of_a_step(
    ranks: dict[tuple[int, str], int],
) -> None:
    extent = 2048
    layout = make_layout(adapter(ranks), BASE, "d", "bfloat16", extent)
    starts = [sum(layout.runs[:index]) * extent for index in range(len(layout.runs))]
    found = pieces(layout, BASE)
    for start, run in zip(starts, layout.runs, strict=True):
        assert any(start <= piece.start < start + run * extent for piece in found)
    layers = [site.layer for site in layout.sites if site.layer >= 0]
    assert layers == sorted(layers)


@pytest.mark.parametrize("extent", [0, -256, 100, 257])
def test_a_wrong_extent_is_a_fault_of_the_caller(extent: int) -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        make_layout(adapter({(0, "q_proj"): 1}), BASE, "d", "float32", extent)


@settings(max_examples=50)
@given(RANKS, DTYPES)
def test_room_is_needed_in_each_memory_to_the_extent(
    ranks: dict[tuple[int, str], int], dtype: SlabDtype
) -> None:
    extent = 2048
    need = make_layout(adapter(ranks), BASE, "d", dtype, extent).nbytes

    def problem(device: int, host: int) -> str:
        room = SlabRoom(dtype, extent, device, host)
        return room_problem(adapter(ranks), BASE, room) or ""

    assert problem(need, need) == ""
    for less in (1, extent):
        assert f"option adapter_memory to {need}" in problem(need - less, need)
        assert f"option host_adapter_memory to {need}" in problem(need, need - less)
        assert f"takes {need} bytes" in problem(need - less, need)
    assert problem(need + extent - 1, need + extent - 1) == ""


def test_little_room_is_lost_between_tensors() -> None:
    """Of Llama-3.1-8B's shapes at rank 16: 80 MiB of tensors, in extents of half a MiB."""
    hidden, inner, kv = 4096, 14336, 1024
    shapes = dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden))
    shapes |= dict.fromkeys(("k_proj", "v_proj"), (hidden, kv))
    shapes |= {"down_proj": (inner, hidden)}
    shapes |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, inner))
    modules = {name: ModuleShape(f"x.{name}", *shape) for name, shape in shapes.items()}
    layers = tuple(LayerModules(layer_stem(n), modules, LAYER_SITES) for n in range(32))
    base = msgspec.structs.replace(BASE, layers=layers)
    ranks = {(layer, name): 16 for layer in range(32) for name in modules}
    layout = make_layout(adapter(ranks), base, "d", "bfloat16", 512 << 10)
    tensors = sum(piece.end - piece.start for piece in pieces(layout, base))
    assert tensors == 80 << 20
    assert layout.nbytes <= 1.08 * tensors
