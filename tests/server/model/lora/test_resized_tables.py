"""Adapters whose training has resized the tables: their vocabulary is smaller or larger than the
base's table, or as large. float32, logprobs within 1e-4 of PEFT on the resized base."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.manifest import SlabLayout
from loraplex.server.protocol import SamplingParams
from tests.grids import beyond
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import VOCAB, add_adapter, make_model, save_model
from tests.server.model.slabs import TOKENS, pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# Tables of their own; a scaled embedding, tied, whose head has a soft cap; others.
FAMILIES = beyond(2, ["llama3", "gemma2", "llama-biases-tied", "gemma3"])
FEW = ["q_proj", "down_proj"]
BOTH = ["lm_head", "embed_tokens"]
NEW = [VOCAB, VOCAB + 1, VOCAB + 2]
# Rows of the tables, and what the config says.
RESIZED: dict[str, tuple[int, dict[str, Any]]] = {
    "saved": (93, {}),
    "trained": (94, {"modules_to_save": BOTH}),
    "no_more_tokens": (TOKENS, {}),
    "dora": (95, {"use_dora": True}),
    "plain": (VOCAB, {}),
    "larger_saved": (VOCAB + 5, {}),
    "larger_trained": (VOCAB + 2, {"modules_to_save": BOTH}),
    "larger_dora": (VOCAB + 1, {"use_dora": True}),
    "larger_padded": (VOCAB + 1000, {}),
    "new_rows": (VOCAB + 3, {"trainable_token_indices": dict.fromkeys(BOTH[::-1], NEW)}),
    "new_and_old_rows": (
        VOCAB + 3,
        {"trainable_token_indices": dict.fromkeys(BOTH[::-1], [5, 9, 10, *NEW])},
    ),
    "rows_and_tables": (VOCAB + 3, {"trainable_token_indices": [9, 4, *NEW]}),
    "rows_and_smaller_tables": (94, {"trainable_token_indices": [93, 4, 90]}),
}
# Whose file has no whole tables: those of the base have no other rows.
ROWS_ALONE = {"new_rows", "new_and_old_rows"}


class Resized(NamedTuple):
    oracle: PeftModel
    size: int
    layout: SlabLayout
    slab: bytes


class Tables(NamedTuple):
    driver: Driver
    adapters: dict[str, Resized]


def resized(
    name: str,
    seed: int,
    size: int,
    options: dict[str, Any],
    *,
    saves_tables: bool,
    shards: int = 1,
    strength: float = 0.3,
) -> Resized:
    """strength: how far rows are from the base's."""
    base, model = make_model(name), make_model(name)
    if size != VOCAB:
        model.resize_token_embeddings(size, mean_resizing=size < VOCAB)
    oracle = add_adapter(model, "one", LoraConfig(r=4, target_modules=FEW, **options), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            is_table = any(table in parameter_name for table in BOTH)
            is_table &= size != VOCAB and saves_tables
            if (parameter.requires_grad or is_table) and "lora_" not in parameter_name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=strength)
    of = base if size != VOCAB else None
    packed = pack(oracle, "one", shards=shards, resized_from=of, saves_tables=saves_tables)
    return Resized(oracle, size, *packed)


@pytest.fixture(scope="module", params=FAMILIES)
def tables(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tables]:
    name = request.param
    adapters = {
        each: resized(name, 3 + i, size, options, saves_tables=each not in ROWS_ALONE)
        for i, (each, (size, options)) in enumerate(RESIZED.items())
    }
    driver = Driver(save_model(make_model(name), tmp_path_factory.mktemp("base")))
    yield Tables(driver, adapters)
    driver.close()


def known_prompt(length: int, seed: int, size: int) -> list[int]:
    """With the adapter's last token, which is an added one if any is; in all kinds of chunks."""
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
    names: list[str | None] = [None, "saved", "no_more_tokens", "larger_saved", "new_rows"]
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
        assert len(sites) == (0 if name == "plain" else 2)
        assert {site.table_size for site in sites} == (set() if size == VOCAB else {size}), name


def test_the_base_and_plain_adapters_are_as_without_new_ids_beside_them(tables: Tables) -> None:
    """To the bit: greedy and drawn answers, and every logprob."""
    slots = tables.driver.load_all(tables.adapters, 0, first=0)
    hot = SamplingParams(temperature=1.3, top_k=60, top_p=0.9, logprobs=20, repetition_penalty=1.1)
    ways = (GREEDY, hot, SamplingParams(temperature=0.7, typical_p=0.8, logprobs=2))
    found = []
    for neighbour in ("trained", "larger_saved", "new_rows"):
        names: list[str | None] = [None, neighbour, "plain", None, neighbour, "saved"]
        streams = [
            Stream(
                tables.driver,
                row,
                known_prompt(5, row, TOKENS),
                slot=slots[name],
                sampling=ways[row % len(ways)],
                seed=row,
            )
            for row, name in enumerate(names)
        ]
        generate(tables.driver, streams, 8, 64)
        found.append([(s.output, s.logprobs) for s in streams if s.row not in (1, 4)])
        for stream in streams:
            stream.free()
    assert found[0] == found[1] == found[2]


def test_every_rule_reaches_new_ids(tables: Tables) -> None:
    """Bias, penalties, suppressed ends, masks and drafts, beside rows without new ids."""
    slots = tables.driver.load_all(tables.adapters, 0, first=0)
    biased = SamplingParams(temperature=0.0, logit_bias={NEW[1]: 1e4})
    penalised = msgspec.structs.replace(biased, frequency_penalty=6e3)
    ends = msgspec.structs.replace(biased, end_token_ids=(NEW[1],))
    rows: list[tuple[str | None, SamplingParams, int]] = [
        ("larger_saved", biased, 0),
        ("larger_saved", penalised, 0),
        ("larger_saved", ends, 1),
        (None, SamplingParams(temperature=0.0, frequency_penalty=0.5), 0),
        ("larger_saved", SamplingParams(temperature=0.0), 0),
    ]
    streams = [
        Stream(
            tables.driver,
            row,
            [5, 6, NEW[1] if name else 7],
            slot=slots[name],
            sampling=sampling,
            suppressed_until=until,
        ).with_ids(tables.adapters[name].size if name else None)
        for row, (name, sampling, until) in enumerate(rows)
    ]
    streams[-1].bound(lambda tokens: [NEW[2], 3] if len(tokens) == 3 else [NEW[0]])
    generate(tables.driver, streams, 3, 64)
    assert streams[0].output == 3 * [NEW[1]]
    assert streams[1].output[0] == NEW[1]
    assert streams[1].output[1:] != 2 * [NEW[1]]
    assert streams[2].output[0] != NEW[1]
    assert streams[2].output[1:] == 2 * [NEW[1]]
    assert max(streams[3].output) < VOCAB
    assert streams[4].output[0] in (3, NEW[2])
    assert streams[4].output[1:] == 2 * [NEW[0]]
    for stream in streams:
        stream.free()


def test_drafts_of_new_ids_are_taken(tables: Tables) -> None:
    slots = tables.driver.load_all(tables.adapters, 0, first=0)
    biased = SamplingParams(temperature=0.0, logit_bias={NEW[1]: 1e4}, logprobs=2)
    names: list[str | None] = ["larger_saved", None, "new_rows"]
    streams = [
        Stream(
            tables.driver,
            row,
            [5, 6],
            slot=slots[name],
            sampling=biased if name else GREEDY,
        ).with_ids(tables.adapters[name].size if name else None)
        for row, name in enumerate(names)
    ]
    for stream in (streams[0], streams[2]):
        stream.draft = lambda tokens: [NEW[1], NEW[1], 4]
    generate(tables.driver, streams, 6, 64)
    for name, stream in zip(names, streams, strict=True):
        if name:
            assert stream.output[:6] == 6 * [NEW[1]]
        stream.free()
