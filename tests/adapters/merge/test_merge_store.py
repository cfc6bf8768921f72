"""A merged adapter is an adapter like any other: made once, judged, kept, packed, or refused."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.judge import rejudge
from loraplex.adapters.merge.job import run_job
from loraplex.adapters.merge.recipe import MergeMember, MergeRecipe, MergeStrategy, make_recipe
from loraplex.adapters.peft.validate import AdapterLimits, SlabRoom
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.safetensors.file import open_weights
from loraplex.adapters.safetensors.floats import read_floats
from loraplex.adapters.slab.layout import make_layout
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.store.store import AdapterStore
from tests.adapter_folders import small_base, write_adapter
from tests.adapters.refusals import refusal, violation_codes
from tests.slab_files import read_layout, save_slab

BASE = small_base()
LIMITS = AdapterLimits(max_lora_rank=32)
Deltas = dict[tuple[int, str], npt.NDArray[Any]]


class Store:
    """A store over a folder of published adapters, and the digests that it knows them by."""

    def __init__(self, root: Path, limits: AdapterLimits = LIMITS) -> None:
        self.root = root
        source = LocalSource((root / "published",))
        self.store = AdapterStore(root / "store", BASE, {"local": source}, limits, lambda: 0.0)

    def publish(self, name: str, **options: Any) -> str:
        write_adapter(self.root / "published" / name, BASE, **options)
        return self.store.admit(AdapterRef("local", name), None).digest

    def content(self, digest: str) -> Path:
        return self.root / "store" / BASE.digest[:32] / "content" / digest

    def deltas(self, digest: str) -> Deltas:
        folder = self.content(digest)
        adapter = rejudge(folder, BASE, LIMITS)
        with open_weights(folder / "adapter_model.safetensors") as weights:

            def read(tensor: Any) -> npt.NDArray[Any]:
                return read_floats(weights.read(tensor), tensor.dtype).reshape(tensor.shape)

            return {
                (m.layer, m.module): m.scale * (read(m.b) @ read(m.a)) for m in adapter.ordinary
            }

    def merge(self, *pairs: tuple[str, float], **options: Any) -> str:
        return self.store.merge(recipe(*pairs, **options), run_job).digest


def recipe(
    *pairs: tuple[str, float], strategy: MergeStrategy = "linear", density: float = 0.5
) -> MergeRecipe:
    return make_recipe([MergeMember(*pair) for pair in pairs], strategy, density, "total")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def assert_equal(found: Deltas, expected: Deltas) -> None:
    assert set(found) == set(expected)
    for key, delta in expected.items():
        np.testing.assert_allclose(found[key], delta, rtol=1e-5, atol=1e-6, err_msg=str(key))


def test_a_merge_is_known_by_its_recipe(store: Store) -> None:
    a, b = (
        store.publish("a", rank=4, seed=1),
        store.publish("b", rank=3, seed=2, targets=["o_proj"]),
    )
    wanted = recipe((a, 0.5), (b, 2.0))
    manifest = store.store.merge(wanted, run_job)
    assert manifest.digest == wanted.digest
    assert manifest.content_digest not in ("", manifest.digest)
    assert manifest.targets == ("o_proj", "q_proj", "v_proj")
    assert manifest.ranks == (3, 4)
    assert store.store.manifest(wanted.digest) == manifest
    deltas_a, deltas_b = store.deltas(a), store.deltas(b)
    expected = {key: 0.5 * delta for key, delta in deltas_a.items()}
    assert_equal(store.deltas(wanted.digest), expected | {k: 2 * d for k, d in deltas_b.items()})


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.25, 0.75]])
def test_weights_that_sum_to_one_give_the_member(
    store: Store, dtype: Any, weights: list[float]
) -> None:
    a = store.publish("a", dtype=dtype, targets=["q_proj", "down_proj", "lm_head", "embed_tokens"])
    assert_equal(store.deltas(store.merge(*((a, weight) for weight in weights))), store.deltas(a))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.3, 1.0]), min_size=3, max_size=3),
    order=st.permutations(range(3)),
)
def test_linear_merges_are_sums_in_any_order(
    store: Store, weights: list[float], order: Sequence[int]
) -> None:
    if not any(weights):
        return
    options: list[dict[str, Any]] = [
        {"rank": 2, "targets": ["q_proj", "up_proj"]},
        {"rank": 5, "targets": ["up_proj"], "layers": [1]},
        {"rank": 3, "targets": ["q_proj", "lm_head"], "config": {"lora_alpha": 7}},
    ]
    digests = [store.publish(f"m{i}", seed=i, **each) for i, each in enumerate(options)]
    expected: Deltas = {}
    for digest, weight in zip(digests, weights, strict=True):
        for key, delta in store.deltas(digest).items() if weight else ():
            expected[key] = expected.get(key, 0) + weight * delta
    merged = store.merge(*((digests[i], weights[i]) for i in order))
    assert_equal(store.deltas(merged), expected)


def test_dare_keeps_the_mean_and_drops_the_share(store: Store) -> None:
    """Of B A with full rank, so that the bounded rank of the result hides nothing."""
    targets = ["k_proj"]
    a = store.publish("a", rank=16, targets=targets, seed=1)
    zero = store.publish("zero", rank=1, targets=["o_proj"], seed=2)
    merged = store.deltas(store.merge((a, 1.0), (zero, 0.0), strategy="dare_linear", density=0.25))
    for key, delta in store.deltas(a).items():
        kept = np.abs(merged[key]) > 1e-4 * np.abs(delta).max()
        assert 0.2 < kept.mean() < 0.3
        np.testing.assert_allclose(merged[key][kept], 4 * delta[kept], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("strategy", ["dare_linear", "dare_ties"])
def test_the_same_recipe_makes_the_same_content(tmp_path: Path, strategy: MergeStrategy) -> None:
    contents = set()
    for name in ("one", "two"):
        store = Store(tmp_path / name)
        pairs = [(store.publish(f"m{i}", seed=i), 0.5) for i in range(2)]
        manifest = store.store.merge(recipe(*pairs, strategy=strategy), run_job)
        contents.add(manifest.content_digest)
    assert len(contents) == 1


def test_a_merge_packs_like_any_adapter(store: Store) -> None:
    pairs = [(store.publish(f"m{i}", seed=i, rank=2 + i), 0.5) for i in range(2)]
    digest = store.merge(*pairs, strategy="ties")
    layout = read_layout(save_slab(store.store, digest, "bfloat16", 4096))
    assert layout.digest == digest
    assert {site.ranks for site in layout.sites} == {(3, 0, 3)}


def test_a_crowd_causes_one_merge_and_later_callers_none(store: Store) -> None:
    pairs = [(store.publish(f"m{i}", seed=i), 0.5) for i in range(2)]
    release, runs = threading.Event(), []

    def run(folder: Path) -> None:
        runs.append(folder)
        assert release.wait(240)
        run_job(folder)

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(store.store.merge, recipe(*pairs), run) for _ in range(8)]
        release.set()
        assert len({future.result().digest for future in asked}) == 1
    Store(store.root).merge(*pairs)
    assert len(runs) == 1


def test_damaged_content_is_made_again(store: Store) -> None:
    pairs = [(store.publish(f"m{i}", seed=i), 0.5) for i in range(2)]
    digest = store.merge(*pairs)
    weights = store.content(digest) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\0")
    assert refusal(lambda: save_slab(store.store, digest, "float32", 4096)) is not None
    assert store.merge(*pairs) == digest
    later = AdapterStore(store.root / "store", BASE, {}, LIMITS)
    assert save_slab(later, digest, "float32", 4096).exists()


def fails(folder: Path) -> None:
    raise AdapterError("too_large", "it takes too long")


def test_a_failed_merge_leaves_nothing_and_is_remembered(store: Store) -> None:
    pairs = [(store.publish(f"m{i}", seed=i), 0.5) for i in range(2)]
    before = sorted(path.name for path in store.content("x").parent.iterdir())
    assert refusal(lambda: store.store.merge(recipe(*pairs), fails)) is not None
    error = refusal(lambda: store.merge(*pairs))
    assert error is not None
    assert error.code == "too_large"
    assert sorted(path.name for path in store.content("x").parent.iterdir()) == before
    staging = store.content("x").parents[1] / "staging"
    assert not list(staging.iterdir())


def test_ranks_that_add_up_to_too_much_are_refused_by_name(store: Store) -> None:
    pairs = [(store.publish(f"m{i}", seed=i, rank=12), 1.0) for i in range(3)]
    error = refusal(lambda: store.merge(*pairs))
    assert error is not None
    assert error.code == "invalid"
    assert "12 + 12 + 12 = 36; at most 32" in error.message
    assert {v.code for v in error.violations} == {"rank_too_large"}
    assert len(error.violations) == 4
    assert store.merge(*pairs, strategy="ties"), "a bounded rank is no sum"


def test_modules_too_large_to_compute_are_refused_by_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.adapters.merge.plan.MAX_DENSE_VALUES", 32 * 48)
    names = ["lm_head", "q_proj"]
    pairs = [(store.publish(f"m{i}", seed=i, targets=names), 1.0) for i in range(2)]
    codes = violation_codes(lambda: store.merge(*pairs, strategy="dare_ties"))
    assert codes == {"module_too_large"}
    assert store.merge(*pairs)


def test_an_adapter_beyond_the_size_limit_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    pairs = [(store.publish(f"m{i}", seed=i), 1.0) for i in range(2)]
    tight = Store(tmp_path, AdapterLimits(max_bytes=1000))
    error = refusal(lambda: tight.merge(*pairs))
    assert error is not None
    assert error.code == "too_large"


@pytest.mark.parametrize("strategy", ["linear", "ties", "dare_linear"])
@pytest.mark.parametrize("option", ["adapter_memory", "host_adapter_memory"])
def test_what_would_not_fit_the_workers_memory_is_refused_before_it_is_computed(
    tmp_path: Path, strategy: MergeStrategy, option: str
) -> None:
    """By the members' headers, with the size that it would have: one byte less is too few."""
    store = Store(tmp_path)
    made = store.merge(*of_other_modules(store), strategy=strategy)
    need = make_layout(
        rejudge(store.content(made), BASE, LIMITS), BASE, "d", "bfloat16", 256
    ).nbytes

    def limited(nbytes: int) -> Store:
        device, host = (nbytes, 1 << 30) if option == "adapter_memory" else (1 << 30, nbytes)
        room = SlabRoom("bfloat16", 256, device, host)
        return Store(tmp_path / str(nbytes), AdapterLimits(max_lora_rank=32, room=room))

    tight = limited(need - 1)
    pairs = of_other_modules(tight)  # each of which fits
    error = refusal(lambda: tight.store.merge(recipe(*pairs, strategy=strategy), fails_if_run))
    assert error is not None
    assert error.code == "too_large"
    assert f"takes {need} bytes" in error.message
    assert f"more than the {need - 1} bytes" in error.message
    assert f"option {option}" in error.message
    enough = limited(need)
    assert enough.merge(*of_other_modules(enough), strategy=strategy) == made


def of_other_modules(store: Store) -> list[tuple[str, float]]:
    targets = (["q_proj"], ["q_proj", "v_proj"], ["up_proj"])
    return [(store.publish(f"m{n}", seed=n, targets=list(t)), 1.0) for n, t in enumerate(targets)]


def fails_if_run(folder: Path) -> None:
    raise AssertionError("it was computed")


def test_members_that_are_gone_are_asked_for_again(store: Store) -> None:
    a = store.publish("a")
    error = refusal(lambda: store.merge((a, 1.0), ("f" * 64, 1.0)))
    assert error is not None
    assert error.code == "unavailable"


def overflow(store: Store) -> list[tuple[str, float]]:
    config = {"lora_alpha": 1e6}
    return [(store.publish(f"m{i}", seed=i, config=config), 1000.0) for i in range(2)]


@pytest.mark.parametrize("make", [overflow])
def test_a_result_that_cannot_be_served_is_refused(
    store: Store, make: Callable[[Store], list[tuple[str, float]]]
) -> None:
    assert violation_codes(lambda: store.merge(*make(store))) <= {"bad_value", "not_finite"}


def test_a_merged_adapter_ends_as_each_member_does(store: Store) -> None:
    ends = {}
    for name, eos in (("a", [7, 9]), ("b", [8]), ("c", None)):
        folder = write_adapter(store.root / "published" / name, BASE, seed=ord(name))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        ends[name] = store.store.admit(AdapterRef("local", name), None).digest
    both = store.merge((ends["a"], 0.5), (ends["b"], 0.25), (ends["c"], 0.25))
    assert store.store.manifest(both).end_token_ids == (7, 8, 9)
    assert read_layout(save_slab(store.store, both, "float32", 4096)).digest == both
    neither = store.merge((ends["c"], 0.5))
    assert store.store.manifest(neither).end_token_ids == ()
