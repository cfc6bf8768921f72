"""Rows of the embedding and the head that adapters bring are PEFT's: float32, logprobs within
1e-4."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.manifest import SlabLayout
from tests.grids import beyond
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, TOLERANCE, assert_parity, prompt
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import (
    VOCAB,
    add_adapter,
    make_model,
    reference_logprobs,
    save_model,
)
from tests.server.model.lora.judged_adapters import assert_as_peft
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# Tables of their own; a scaled embedding and tied tables; tied tables.
FAMILIES = beyond(2, ["llama3", "gemma3", "llama-biases-tied"])
FEW = ["q_proj", "down_proj"]
EVEN = list(range(4, 90, 2))
SAVED: dict[str, dict[str, Any]] = {
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "both": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "both_dora": {"modules_to_save": ["lm_head", "embed_tokens"], "use_dora": True},
    "ensured": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": EVEN},
    "tokens_of_head": {"trainable_token_indices": {"lm_head": EVEN}},
    "tokens_of_both": {"trainable_token_indices": {"embed_tokens": [9, 3], "lm_head": EVEN}},
    "same_tokens": {"trainable_token_indices": {"embed_tokens": EVEN, "lm_head": EVEN}},
    "ensured_tokens": {
        "trainable_token_indices": {"embed_tokens": EVEN},
        "ensure_weight_tying": True,
    },
    "tokens_and_head": {
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": {"embed_tokens": [5, 6, 7]},
    },
    "plain": {},
}


class Saved(NamedTuple):
    oracle: PeftModel
    layout: SlabLayout
    slab: bytes


def saved(name: str, seed: int, options: dict[str, Any], shards: int = 1) -> Saved:
    config = LoraConfig(r=4, lora_alpha=6, target_modules=FEW, **options)
    oracle = add_adapter(make_model(name), "one", config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            if parameter.requires_grad and "lora_" not in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return Saved(oracle, *pack(oracle, "one", shards=shards))


class Tables(NamedTuple):
    name: str
    driver: Driver
    adapters: dict[str, Saved]


@pytest.fixture(scope="module", params=FAMILIES)
def tables(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tables]:
    name = request.param
    # On tied tables PEFT saves the base's head of it, under a name of its own.
    names = [each for each in SAVED if name == "llama3" or each != "tokens_and_head"]
    adapters = {each: saved(name, 3 + i, SAVED[each]) for i, each in enumerate(names)}
    driver = Driver(save_model(make_model(name), tmp_path_factory.mktemp("base")))
    yield Tables(name, driver, adapters)
    driver.close()


@pytest.mark.parametrize(("chunk", "shift"), [(64, 0), (3, 5)])
def test_in_one_batch_and_after_a_reload(tables: Tables, chunk: int, shift: int) -> None:
    """With plain ones and the base; slots and extents change hands."""
    slots = tables.driver.load_all(tables.adapters, shift, first=7 * shift)
    streams = [
        Stream(tables.driver, row, prompt((9, 2, 14)[row % 3], row), slot=slot, sampling=GREEDY)
        for row, slot in enumerate([*slots.values(), *slots.values()])
    ]
    generate(tables.driver, streams, 5, chunk)
    for name, stream in zip([*slots, *slots], streams, strict=True):
        oracle = tables.adapters[name or "plain"].oracle
        assert_parity(oracle, None if name is None else "one", stream)
        stream.free()


def test_alone(tables: Tables) -> None:
    slots = tables.driver.load_all(tables.adapters, 0, first=0)
    for name, adapter in tables.adapters.items():
        stream = Stream(tables.driver, 0, prompt(11, 2), slot=slots[name], sampling=GREEDY)
        generate(tables.driver, [stream], 4, 4)
        assert_parity(adapter.oracle, "one", stream)
        stream.free()


def test_tied_rows_lie_in_the_slab_once(tables: Tables) -> None:
    is_tied = tables.name != "llama3"
    for name in ("tokens", "same_tokens", "ensured", "both"):
        layout = tables.adapters[name].layout
        offsets = {site.table_offset for site in layout.sites if site.table_offset >= 0}
        shared = is_tied and name != "both"
        alone = not is_tied and name in ("tokens", "ensured")
        assert len(offsets) == (1 if shared or alone else 2), name


def test_own_rows_change_the_answer(tables: Tables) -> None:
    """Guards the tests above."""
    ids = [*EVEN[:3], 3, 5, 7, 9, *prompt(12, 5)]
    for name, adapter in tables.adapters.items():
        oracle = adapter.oracle
        trained = {
            each: parameter.detach().clone()
            for each, parameter in oracle.named_parameters()
            if parameter.requires_grad and "lora_" not in each
        }
        assert bool(trained) == (name != "plain")
        found = reference_logprobs(oracle, "one", ids)
        for each, rows in trained.items():
            with torch.no_grad():
                oracle.get_parameter(each).zero_()
            changed = reference_logprobs(oracle, "one", ids)
            with torch.no_grad():
                oracle.get_parameter(each).copy_(rows)
            assert (found - changed).abs().max() > 100 * TOLERANCE, each


HEAD, BOTH = ["lm_head"], ["embed_tokens", "lm_head"]
TIED = {"ensure_weight_tying": True}
# Tables in two lists are saved whole, and have no LoRA. On tied tables their LoRA is tied, too.
TARGETED: dict[str, dict[str, Any]] = {
    "named_twice": {"target_modules": [*FEW, *BOTH], "modules_to_save": BOTH},
    "head_by_pattern": {
        "target_modules": ".*(lm_head|embed_tokens)",
        "modules_to_save": HEAD,
    },
    "tied": {"target_modules": [*FEW, "embed_tokens"], **TIED},
    "tied_by_pattern": {"target_modules": ".*(q_proj|lm_head)", **TIED},
}


# Tables that the training has resized, and their LoRA.
for rows in (93, VOCAB + 3):
    of_both = {"target_modules": [*FEW, *BOTH], "rows": rows}
    TARGETED |= {f"resized_{rows}": of_both, f"rslora_{rows}": {**of_both, "use_rslora": True}}


@pytest.mark.parametrize(
    ("family", "shards"), beyond(2, [("llama-biases-tied", 2), ("llama3", 1), ("gemma3", 1)])
)
def test_tables_that_are_targeted_too(family: str, shards: int, tmp_path: Path) -> None:
    assert_as_peft(family, save_model(make_model(family), tmp_path), TARGETED, shards)


def test_a_tied_table_whose_name_peft_does_not_know(tmp_path: Path) -> None:
    """The head stays the base's."""
    saved = {"modules_to_save": ["wte"], "target_modules": ["c_attn"], **TIED}
    assert_as_peft("gpt2", save_model(make_model("gpt2"), tmp_path), {"saved": saved})


# Of a model whose head has a bias. A copy of both, saved beside LoRA, is the base's; tables that
# the training has made smaller have a smaller bias.
WITH_BIAS: dict[str, dict[str, Any]] = {
    "targeted": {},
    "whole": {"modules_to_save": ["lm_head"]},
    "whole_and_all": {"modules_to_save": ["lm_head"], "bias": "all"},
    "smaller": {"rows": 93},
    "plain": {},
}


@pytest.mark.parametrize(
    ("family", "shards"), beyond(1, [("phi", 2), *product(["phi", "gptj", "codegen"], [1, 4])])
)
def test_a_head_with_a_bias(family: str, shards: int, tmp_path: Path) -> None:
    base = save_model(make_model(family), tmp_path)
    target = VARIANTS[family].targets[0]
    of_all = {n: {"target_modules": [target], **each} for n, each in WITH_BIAS.items()}
    of_all["targeted"] = {"target_modules": [target, "lm_head"]}
    assert_as_peft(family, base, of_all, shards)
