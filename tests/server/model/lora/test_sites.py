"""Where adapters lie in the arena: the device's records, the reference's views, what is refused."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.base import MODEL_SITES, BaseSpec, Role, base_modules
from loraplex.adapters.errors import Findings
from loraplex.adapters.manifest import SiteLayout, SlabLayout
from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.lora_tensors import LoraTensors, ModuleLora
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.slab.layout import PlacedMatrix, a_matrix, b_matrices, make_layout
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.lora.sites import Sites
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.spec.model_spec import ModelSpec
from tests.server.model.hub_models import make_model

ITEM_BYTES = 2
RANKS = (0, 0, 1, 3, 16, 40)
LAYER_SITES: tuple[Role, ...] = ("qkv", "o", "gate_up", "down")


@cache
def model() -> ModelSpec:
    return read_model(json.loads(make_model("llama3").config.to_json_string()))


@cache
def base() -> BaseSpec:
    return base_spec(model(), "0" * 64, ("base",))


def layout_of(modules: Sequence[ModuleLora], extent_bytes: int) -> SlabLayout:
    findings = Findings()
    config = parse_config(b'{"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}', findings)
    assert config is not None
    return make_layout(
        LoraTensors(config, tuple(modules)), base(), "1" * 64, "bfloat16", extent_bytes
    )


def random_layout(rng: random.Random, extent_bytes: int) -> SlabLayout:
    """Any module of any rank, or without one."""
    names = [(module.layer, module.name) for module in base_modules(base())]
    nowhere = TensorInfo("", "BF16", (), 0, 0)
    ranks = [(layer, name, rng.choice(RANKS)) for layer, name in names]
    return layout_of(
        [ModuleLora(*place, rng.random(), nowhere, nowhere) for place in ranks if place[2]],
        extent_bytes,
    )


def scattered(rng: random.Random, layout: SlabLayout) -> tuple[tuple[int, ...], int]:
    """The first extent of each run, the runs anyhow in an arena; and the arena's extents."""
    firsts = [0] * len(layout.runs)
    used = 0
    for run in rng.sample(range(len(firsts)), len(firsts)):
        firsts[run] = used + rng.randrange(3)
        used = firsts[run] + layout.runs[run]
    return tuple(firsts), used + 1


def make_table(extents: int, extent_bytes: int) -> AdapterTable:
    return AdapterTable(
        Sites(model()),
        slots=2,
        extents=extents,
        extent_bytes=extent_bytes,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def number_of(site: SiteLayout) -> int:
    if site.layer < 0:
        return model().num_layers * len(LAYER_SITES) + MODEL_SITES.index(site.role)
    return site.layer * len(LAYER_SITES) + LAYER_SITES.index(site.role)


@given(seed=st.integers(0, 10**6), extent_bytes=st.sampled_from((256, 1024, 4096, 1 << 16)))
def test_records_and_views_say_where_the_bytes_are(seed: int, extent_bytes: int) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng, extent_bytes)
    firsts, extents = scattered(rng, layout)
    table = make_table(extents, extent_bytes)
    adapter = table.prepare(1, layout, firsts)
    table.bind(1, adapter)
    weights, words = adapter.weights, table.device_table.words[1]
    # Of every byte of the slab, its place in the arena.
    runs = zip(firsts, layout.runs, strict=True)
    spans = [np.arange(e * extent_bytes, (e + n) * extent_bytes) for e, n in runs]
    places = np.concatenate([np.empty(0, dtype=np.int64), *spans])

    def assert_at(matrix: PlacedMatrix, address: int, view: torch.Tensor) -> None:
        begin = address - table.arena.data_ptr()
        own = places[matrix.offset : matrix.offset + matrix.nbytes]
        assert np.array_equal(own, np.arange(begin, begin + matrix.nbytes))
        assert view.data_ptr() == address
        assert view.T.is_contiguous() or view.is_contiguous()
        assert view.numel() * view.itemsize == matrix.nbytes

    numbers = [number_of(site) for site in layout.sites]
    assert sorted(weights) == sorted(numbers)
    assert {i for i, record in enumerate(words) if record.view(torch.int32)[:15].any()} == set(
        numbers
    )
    for number, site in zip(numbers, layout.sites, strict=True):
        record, found = words[number], weights[number]
        a = a_matrix(site, base(), ITEM_BYTES)
        assert_at(a, int(record[0]), found.a_t)
        stored = found.a_t if site.role == "embed_tokens" else found.a_t.T
        assert tuple(stored.shape) == a.shape
        ranks = (*site.ranks, 0, 0, 0)[:3]
        assert record.view(torch.int32)[8:12].tolist() == [*ranks, sum(ranks)]
        floats = torch.tensor((*site.scales, 0, 0, 0)[:3], dtype=torch.float32)
        assert torch.equal(record.view(torch.float32)[12:15], floats)
        targeted = iter(found.projections)
        for i, b in enumerate(b_matrices(site, base(), ITEM_BYTES)):
            if b is None:
                assert int(record[1 + i]) == 0
                continue
            projection = next(targeted)
            assert_at(b, int(record[1 + i]), projection.b_t)
            assert tuple(projection.b_t.T.shape) == b.shape
            assert projection.scale == site.scales[i]
            assert projection.rank_end - projection.rank_begin == site.ranks[i]
            widths = table.sites[number].out_features
            assert projection.out_begin == sum(widths[:i])
            assert projection.out_end == sum(widths[: i + 1])
        assert next(targeted, None) is None


def test_a_slot_bound_again_keeps_nothing_of_the_adapter_before() -> None:
    nowhere = TensorInfo("", "BF16", (), 0, 0)
    head = layout_of([ModuleLora(-1, "lm_head", 4, 1.0, nowhere, nowhere)], 4096)
    down = layout_of([ModuleLora(1, "down_proj", 4, 1.0, nowhere, nowhere)], 4096)
    table = make_table(64, 4096)
    for layout in (head, down, head):
        firsts = tuple(sum(layout.runs[:i]) for i in range(len(layout.runs)))
        table.bind(0, table.prepare(0, layout, firsts))
        number = number_of(layout.sites[0])
        batch = table.batch(np.array([0, 1]))
        assert batch is not None
        assert [list(segment.weights) for segment in batch.segments] == [[number], []]
        records = table.device_table.ints[0, :, :15]
        assert records.any(dim=1).nonzero().flatten().tolist() == [number]
        assert table.changes_model(np.array([-1, 0])) == (layout is head)


QKV = SiteLayout(0, "qkv", (4, 0, 4), (1.0, 0.0, 1.0), 0, (1024, 0, 2048))


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ({"layer": 99}, "no site qkv in layer 99"),
        ({"layer": -1}, "no site qkv in layer -1"),
        ({"role": "embed_tokens"}, "no site embed_tokens in layer 0"),
        ({"ranks": (4, 0)}, "one rank per projection"),
        ({"scales": (1.0,)}, "one rank per projection"),
        ({"role": "down"}, "one rank per projection"),
        (
            {"ranks": (257, 0, 4), "a_offset": 12288, "b_offsets": (12288, 0, 0)},
            "not all in 0..256",
        ),
        ({"ranks": (-1, 0, 4)}, "not all in 0..256"),
        ({"a_offset": -256}, "lies outside the slab"),
        ({"a_offset": 1 << 20}, "lies outside the slab"),
        ({"a_offset": 1 << 70}, "out of range"),
        ({"b_offsets": (1024, 0, 3 * 4096 - 128)}, "leaves its run"),
        ({"b_offsets": (1024, 0, 2047)}, "multiples of 16"),
    ],
)
def test_a_site_that_does_not_fit_is_refused(site: dict[str, Any], words: str) -> None:
    layout = SlabLayout(
        "1" * 64,
        "0" * 64,
        "bfloat16",
        4096,
        (1, 1, 1, 40),
        (QKV, msgspec.structs.replace(QKV, **site)),
    )
    table = make_table(64, 4096)
    with pytest.raises(ValueError, match=words):
        table.prepare(0, layout, (0, 1, 2, 3))
    assert not table.device_table.words.any()


@pytest.mark.parametrize(
    ("firsts", "words"),
    [
        ((), "expected 1 runs of extents, got 0"),
        ((64,), "extent 64 lies outside the device arena"),
        ((-1,), "extent -1 lies outside the device arena"),
        ((1 << 50,), "extent 1125899906842624 lies outside"),
        ((1 << 51,), "out of range"),
    ],
)
def test_extents_outside_the_arena_are_refused(firsts: tuple[int, ...], words: str) -> None:
    layout = SlabLayout("1" * 64, "0" * 64, "bfloat16", 4096, (1,), (QKV,))
    with pytest.raises(ValueError, match=words):
        make_table(64, 4096).prepare(0, layout, firsts)
