"""A model that devices share by the GPU's kernels, in Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.kernels.batches import interpreted
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.families.variants import VARIANTS
from tests.server.model.gpu_pair import assert_same, ordinary, small_pair
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.lora.dora_adapters import dora_adapters
from tests.server.model.lora.own_tables_pair import own_tables, own_tables_pair
from tests.server.model.lora.test_resized_gpu_path import (
    BASE,
    LARGER,
    NEW_ROWS,
    PLAIN,
    resized_pair,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT compares patterns with modules alone, though they hold for parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    # Infinity is meant.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    interpreted,
]
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
SERVED: dict[tuple[str, str], dict[str, Any]] = {
    ("llama3", "fa3"): {},
    ("granite-hybrid", "fa3"): {"hidden_size": 64, "layer_types": ["attention"] * 2},
    ("olmo2", "fa2"): {},
    ("phi", "fa3"): {"hidden_size": 64},
    ("qwen3-moe", "fa3"): {"head_dim": 16},
    ("qwen3.5", "fa3"): {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    ("lfm2", "fa3"): {"hidden_size": 64, "layer_types": ["conv", "full_attention"]},
    ("granite-h", "fa3"): {"hidden_size": 64, "layer_types": ["linear_attention", "attention"]},
    ("falcon-h1", "fa3"): {"hidden_size": 64},
    ("phi3", "fa3"): {"hidden_size": 64},
    ("deepseek-v3", "fa3"): {"hidden_size": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
}
ALWAYS = {("llama3", "fa3")}
# Whose branches are summed on each device first, so that no norm sums the devices' terms.
SUMS_BEFORE = {"phi"}


@pytest.mark.parametrize("row", ordinary(SERVED, ALWAYS))
def test_two_devices(row: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base and adapters, those of the embedding and the head too."""
    name, backend = row
    variant = VARIANTS[name]
    model = make_model(name, **{**SMALL, **SERVED[row]})
    zoo = zoo_of(variant)
    adapters = {each: zoo[each] for each in ("rank64_everything", "rank3_rslora")}
    adapters |= dict(list(variant.others().items())[:1])  # of experts, where there are some
    options: dict[str, Any] = {"backend": backend, "shards": 2}
    with small_pair(model, adapters, tmp_path, monkeypatch, **options) as pair:
        assert_same(pair, [len(adapters) - 1, -1, 1])
        assert_same(pair, [0, -1], in_graphs=False)
        if name not in SUMS_BEFORE:
            assert all(group.sums and group.late_sums for group in pair.groups)


# `lora/test_dora_gpu_path.py` has DoRA, biases and own tables in a short run, of one device.
@pytest.mark.parametrize("row", ordinary([("llama-biases-tied", "fa2"), ("phi3", "fa3")], []))
def test_dora(row: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, backend = row
    model = make_model(name, **{**SMALL, "hidden_size": 64})
    adapters = dora_adapters(VARIANTS[name])
    options: dict[str, Any] = {"backend": backend, "shards": 2, "dora_graphs": True}
    with small_pair(model, adapters, tmp_path, monkeypatch, **options) as pair:
        plain, dora, few, tables = range(4)
        assert_same(pair, [dora, -1, plain, few])
        assert_same(pair, [tables, dora, -1, plain], in_graphs=False)


@pytest.mark.exhaustive
def test_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of B, and in place of the base's, also where there is no LoRA."""
    model = make_model("llama-biases-tied", **SMALL)
    save_model(model, tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)  # the adapter's
    adapters = {
        "plain": LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
        "biased": LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], bias="all", lora_bias=True
        ),
    }
    options: dict[str, Any] = {"shards": 2, "dora_graphs": True}
    with small_pair(model, adapters, tmp_path, monkeypatch, **options) as pair:
        assert_same(pair, [1, -1, 0, 1])


@own_tables(0)
def test_own_tables(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_tables_pair(tables, SMALL, tmp_path, monkeypatch, shards=2) as pair:
        assert_same(pair, [0, -1, -1, 0], in_graphs=False)
        assert_same(pair, [-1, -1, -1])


@pytest.mark.exhaustive
def test_new_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the base's tables, in whole tables and in trained rows."""
    with resized_pair("llama3", tmp_path, monkeypatch, shards=2) as pair:
        assert_same(pair, [LARGER, BASE, NEW_ROWS, PLAIN], in_graphs=False)
