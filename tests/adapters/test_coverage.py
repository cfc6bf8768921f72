"""Partial adapters: what is missing is what PEFT calls missing, and it is never forgotten."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.coverage import Coverage, coverage_of
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.job import run_job
from loraplex.adapters.merge.recipe import MergeMember, make_recipe
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import ALL_PROJECTIONS, small_base, write_adapter

LAYERS = 6
BASE = small_base(num_layers=LAYERS)
LIST = st.lists(st.sampled_from(ALL_PROJECTIONS), min_size=1, max_size=4, unique=True)


def coverage(folder: Path) -> Coverage:
    found = judge_folder(folder, BASE).manifest.coverage
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("present", "missing", "text"),
    [
        ([(0, "q_proj")], [], "all 1 targeted modules have weights"),
        (
            [(layer, name) for layer in range(2) for name in "abcdefg"],
            [(layer, name) for layer in range(2, 6) for name in "abcdefg"],
            "partial: 14 of 42 targeted modules have weights, 28 are missing; 2 of 6 layers: 0-1",
        ),
        (
            [(0, "a"), (2, "a"), (3, "a"), (-1, "lm_head")],
            [(0, "b"), (5, "a")],
            "partial: 4 of 6 targeted modules have weights, 2 are missing; 3 of 4 layers: 0, 2-3; "
            "b not everywhere",
        ),
        (
            [(0, "a")],
            [(-1, "lm_head")],
            "partial: 1 of 2 targeted modules have weights, 1 is missing; lm_head not everywhere",
        ),
        (
            [(layer, "a") for layer in range(0, 40, 2)],
            [(layer, "a") for layer in range(1, 40, 2)],
            "partial: 20 of 40 targeted modules have weights, 20 are missing; "
            "20 of 40 layers: 0, 2, 4, 6, 8, 10, 12, 14, …",
        ),
    ],
)
def test_words(present: Any, missing: Any, text: str) -> None:
    assert coverage_of(present, missing).text == text


SITES = st.frozensets(st.tuples(st.integers(-1, 9), st.sampled_from("abc")), max_size=20)


@given(SITES, SITES)
def test_counts(sites: frozenset[tuple[int, str]], absent: frozenset[tuple[int, str]]) -> None:
    present, missing = sites - absent, absent
    found = coverage_of(present, missing)
    layers = {layer for layer, _ in present if layer >= 0}
    runs = [layer for first, last in found.layers for layer in range(first, last + 1)]
    assert runs == sorted(layers)
    assert all(b[0] > a[1] + 1 for a, b in zip(found.layers, found.layers[1:], strict=False))
    assert (found.modules, found.targeted) == (len(present), len(present | missing))
    assert found.is_partial == bool(missing)
    assert found.num_layers <= found.targeted_layers
    assert msgspec.json.decode(msgspec.json.encode(found), type=Coverage) == found


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BASE.vocab_size,
            hidden_size=BASE.hidden_size,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    LIST,
    st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS, unique=True),
    st.none() | st.lists(st.integers(0, LAYERS - 1), min_size=1, unique=True),
    st.none() | st.sampled_from(["v_proj", "mlp.up_proj"]),
)
def test_what_is_missing_is_what_peft_misses(
    tmp_path: Path,
    llama: LlamaForCausalLM,
    targets: list[str],
    layers: list[int],
    only: list[int] | None,
    exclude: str | None,
) -> None:
    """only: what the config targets on purpose."""
    there = [layer for layer in layers if only is None or layer in only]
    kept = [name for name in targets if exclude is None or not exclude.endswith(name)]
    if not there or not kept:
        return
    options = {"layers_to_transform": only, "exclude_modules": exclude and [exclude]}
    folder = write_adapter(tmp_path / "a", BASE, targets=kept, layers=there, config=options)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
    model = get_peft_model(llama, LoraConfig.from_pretrained(str(folder)))
    try:
        result = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    finally:
        model.unload()
    missed = [key for key in result.missing_keys if ".lora_A." in key]
    found = coverage(folder)
    assert found.targeted - found.modules == len(missed)
    assert found.modules == len(there) * len(kept)


def test_deliberately_few_layers_are_not_missing(tmp_path: Path) -> None:
    options = {"layers_to_transform": [1, 3]}
    folder = write_adapter(tmp_path / "a", BASE, layers=[1, 3], config=options)
    assert not coverage(folder).is_partial
    assert judge_folder(folder, BASE).manifest.partial is None


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.open()

    def open(self) -> None:
        source = LocalSource((self.root / "published",))
        self.store = AdapterStore(self.root / "store", BASE, {"local": source})

    def publish(self, name: str, **options: Any) -> AdapterManifest:
        write_adapter(self.root / "published" / name, BASE, **options)
        return self.admit(name)

    def admit(self, name: str) -> AdapterManifest:
        return self.store.admit(AdapterRef("local", name), None)

    def merge(self, *members: AdapterManifest) -> AdapterManifest:
        weighted = [MergeMember(member.digest, 1.0) for member in members]
        return self.store.merge(make_recipe(weighted, "linear", 1.0, "total"), run_job)


def test_stored_content_stays_partial(tmp_path: Path) -> None:
    """Also what was stored by a release that did not keep it."""
    store = Store(tmp_path)
    made = store.publish("cut", layers=[0])
    assert made.partial is not None
    assert made.partial.modules == 2
    store.open()
    assert store.admit("cut") == made
    (manifest,) = (tmp_path / "store").rglob("manifest*.json")
    old = json.loads(manifest.read_text())
    del old["coverage"]
    manifest.write_text(json.dumps(old))
    store.open()
    for _ in range(2):
        assert store.admit("cut") == made


def test_a_merge_misses_what_no_member_has(tmp_path: Path) -> None:
    store = Store(tmp_path)
    low = store.publish("low", layers=[0, 1, 2])
    high = store.publish("high", layers=[3, 4, 5], seed=1)
    cut = store.publish("cut", layers=[1], seed=2)
    assert store.merge(low, high).partial is None
    merged = store.merge(low, cut).partial
    assert merged is not None
    assert (merged.layers, merged.targeted) == (((0, 2),), 12)
    store.open()
    assert store.merge(low, cut).partial == merged
