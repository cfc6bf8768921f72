"""Adapters whose training has resized the tables: their vocabulary is smaller than the base's
padded table, or as large. float32, logprobs within 1e-4 of PEFT on the resized base."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel

from adapters.manifest import SlabLayout
from server.protocol import SamplingParams
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import VOCAB, add_adapter, make_model, save_model
from tests.server.model.slabs import TOKENS, pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# Tied tables; tables of their own; a scaled embedding and tied tables; a head with a soft cap.
FAMILIES = ["llama-biases-tied", "llama3", "gemma3", "gemma2"]
FEW = ["q_proj", "down_proj"]
BOTH = ["lm_head", "embed_tokens"]
# Rows of the tables, and what the config says.
RESIZED: dict[str, tuple[int, dict[str, Any]]] = {
    "saved": (93, {}),
    "trained": (94, {"modules_to_save": BOTH}),
    "no_more_tokens": (TOKENS, {}),
    "dora": (95, {"use_dora": True}),
    "plain": (VOCAB, {}),
}


class Resized(NamedTuple):
    oracle: PeftModel
    size: int
    layout: SlabLayout
    slab: bytes


class Tables(NamedTuple):
    driver: Driver
    adapters: dict[str, Resized]


def resized(name: str, seed: int, size: int, options: dict[str, Any], shards: int = 1) -> Resized:
    base, model = make_model(name), make_model(name)
    if size < VOCAB:
        model.resize_token_embeddings(size)
    oracle = add_adapter(model, "one", LoraConfig(r=4, target_modules=FEW, **options), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            is_table = size < VOCAB and any(table in parameter_name for table in BOTH)
            if (parameter.requires_grad or is_table) and "lora_" not in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    packed = pack(oracle, "one", shards=shards, resized_from=base if size < VOCAB else None)
    return Resized(oracle, size, *packed)


@pytest.fixture(scope="module", params=FAMILIES)
def tables(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tables]:
    name = request.param
    adapters = {
        each: resized(name, 3 + i, size, options)
        for i, (each, (size, options)) in enumerate(RESIZED.items())
    }
    driver = Driver(save_model(make_model(name), tmp_path_factory.mktemp("base")))
    yield Tables(driver, adapters)
    driver.close()


def known_prompt(length: int, seed: int, size: int) -> list[int]:
    """With the adapter's last token, which is an added one if any is."""
    return [size - 1, *(token % size for token in prompt(length, seed))]


@pytest.mark.parametrize(("chunk", "shift"), [(64, 0), (3, 2)])
def test_in_one_batch_and_after_a_reload(tables: Tables, chunk: int, shift: int) -> None:
    """With plain ones and the base; slots and extents change hands."""
    slots = tables.driver.load_all(tables.adapters, shift, first=7 * shift)
    sizes = {name: adapter.size for name, adapter in tables.adapters.items()}
    named = [*slots.items(), *slots.items()]
    streams = [
        Stream(
            tables.driver,
            row,
            known_prompt((9, 2, 14)[row % 3], row, sizes.get(name or "", VOCAB)),
            slot=slot,
            sampling=GREEDY,
        )
        for row, (name, slot) in enumerate(named)
    ]
    generate(tables.driver, streams, 5, chunk)
    for (name, _), stream in zip(named, streams, strict=True):
        oracle = tables.adapters[name or "plain"].oracle
        assert_parity(oracle, None if name is None else "one", stream)
        stream.free()


def test_alone(tables: Tables) -> None:
    slots = tables.driver.load_all(tables.adapters, 0, first=0)
    for name, adapter in tables.adapters.items():
        ids = known_prompt(11, 2, adapter.size)
        stream = Stream(tables.driver, 0, ids, slot=slots[name], sampling=GREEDY)
        generate(tables.driver, [stream], 4, 4)
        assert_parity(adapter.oracle, "one", stream)
        stream.free()


def test_no_id_beyond_the_table_is_ever_drawn(tables: Tables) -> None:
    """Not even hot, by rows that share the step with rows of the base, which have all ids."""
    slots = tables.driver.load_all(tables.adapters, 0, first=0)
    hot = SamplingParams(temperature=50.0, logprobs=EVERY_LOGPROB)
    names: list[str | None] = [None, "saved", "no_more_tokens"]
    streams = [
        Stream(tables.driver, row, known_prompt(5, row, TOKENS), slot=slots[name], sampling=hot)
        for row, name in enumerate(names)
    ]
    generate(tables.driver, streams, 40, 64)
    for name, stream in zip(names, streams, strict=True):
        size = VOCAB if name is None else tables.adapters[name].size
        assert max(stream.output) < size
        stream.free()


def test_a_smaller_table_takes_less(tables: Tables) -> None:
    for name, (size, _) in RESIZED.items():
        sites = [s for s in tables.adapters[name].layout.sites if s.table_offset >= 0]
        assert {site.table_size for site in sites} == (set() if size == VOCAB else {size}), name
