"""Tables that are smaller or larger than the base's, by the GPU's kernels in Triton's interpreter:
as the reference operations, which `test_resized_tables` holds to PEFT. By one device and by two."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peft import LoraConfig

from loraplex.server.protocol import SamplingParams
from tests.grids import beyond
from tests.kernels.batches import interpreted
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.gpu_pair import Pair, assert_same, small_pair
from tests.server.model.hub_models import VOCAB, add_adapter, make_model
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    interpreted,
]
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
PLAIN, RESIZED, LARGER, NEW_ROWS = range(4)
BASE = -1
FIRST = 500  # extents of each
NEW = [VOCAB, VOCAB + 1, VOCAB + 2]
ROWS = {"trainable_token_indices": {"embed_tokens": NEW, "lm_head": NEW}}
# Of each slot: rows of the tables, and what the config says.
FORMS: dict[int, tuple[int, dict[str, Any]]] = {
    RESIZED: (93, {}),
    LARGER: (VOCAB + 3, {}),
    NEW_ROWS: (VOCAB + 3, ROWS),
}


@pytest.fixture(
    scope="module",
    params=[
        ("llama3", 1),
        pytest.param(("llama3", 2), marks=pytest.mark.exhaustive),
        pytest.param(("gemma2", 1), marks=pytest.mark.exhaustive),
        pytest.param(("gemma2", 2), marks=pytest.mark.exhaustive),
    ],
    ids=lambda row: f"{row[0]}-{row[1]}",
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name, shards = request.param
    with (
        pytest.MonkeyPatch.context() as patch,
        resized_pair(name, tmp_path_factory.mktemp("base"), patch, shards) as found,
    ):
        yield found


@contextmanager
def resized_pair(name: str, folder: Path, patch: pytest.MonkeyPatch, shards: int) -> Iterator[Pair]:
    """With an adapter in each slot. shards: of the GPU path."""
    plain = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    options: dict[str, Any] = {"max_draft": 2, "shards": shards}
    base = make_model(name, **SMALL)
    with small_pair(base, {"plain": plain}, folder, patch, **options) as pair:
        load_resized(pair, name)
        yield pair


def load_resized(pair: Pair, name: str) -> None:
    base = make_model(name, **SMALL)
    for slot, (rows, options) in FORMS.items():
        model = make_model(name, **SMALL)
        model.resize_token_embeddings(rows)
        own = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
        oracle, saves = add_adapter(model, "one", own, 7), not options
        for driver in (pair.reference, pair.gpu):
            shards = driver.config.shards
            packed = pack(oracle, "one", shards=shards, resized_from=base, saves_tables=saves)
            assert driver.load(slot, *packed, slot * FIRST).error is None


@pytest.mark.parametrize(
    "slots",
    beyond(
        1,
        [
            [LARGER, BASE, NEW_ROWS],
            [RESIZED, BASE, PLAIN],
            [RESIZED, RESIZED, PLAIN, BASE],
            [LARGER, BASE, NEW_ROWS, PLAIN],
            [RESIZED, LARGER, BASE, LARGER],  # longer prompts have ids that RESIZED lacks
        ],
    ),
)
def test_same_as_the_reference(pair: Pair, slots: list[int]) -> None:
    pair.graphs.clear()
    assert_same(pair, slots)
    assert -len(slots) in pair.graphs, "decodes"
    assert len(slots) not in pair.graphs


# A row without new ids passes the bias over.
HOT = SamplingParams(
    temperature=1.5, top_k=40, top_p=0.9, logprobs=2, logit_bias={NEW[0]: 4.0, NEW[2]: 4.0}
)
RULES = [
    SamplingParams(temperature=0.0, logit_bias={NEW[1]: 1e4}, logprobs=1, prompt_logprobs=1),
    HOT,
    msgspec.structs.replace(HOT, repetition_penalty=1.3, min_p=0.01, prompt_logprobs=2),
    msgspec.structs.replace(HOT, typical_p=0.8, end_token_ids=(NEW[0],)),
]


@pytest.mark.parametrize(
    ("allowed", "slots"),
    beyond(
        1,
        [
            (allowed, slots)
            for allowed in ([*range(0, 90, 3), *NEW], None)
            for slots in ([LARGER, BASE, NEW_ROWS, PLAIN], [BASE, LARGER, PLAIN, NEW_ROWS])
        ],
    ),
)
def test_every_rule_with_new_ids(pair: Pair, slots: list[int], allowed: list[int] | None) -> None:
    """New ids in prompts, drafts and draws, beside rows that have none."""

    def run(driver: Driver) -> list[Stream]:
        streams = []
        for row, (slot, sampling) in enumerate(zip(slots, RULES, strict=True)):
            is_wide = slot in (LARGER, NEW_ROWS)
            ids = [5, NEW[row % 3], 7, 9, NEW[2]] if is_wide else [5, 6, 7]
            given = SamplingParams(temperature=0.0) if row == 0 and not is_wide else sampling
            stream = Stream(
                driver, row, ids, slot=slot, sampling=given, seed=row, suppressed_until=2
            ).with_ids(VOCAB + 3 if is_wide else None)
            if allowed is not None and is_wide:
                stream.bound(lambda tokens: allowed)
            elif is_wide:
                stream.draft = lambda tokens: [NEW[1], 3]
            streams.append(stream)
        generate(driver, streams, 4, 3)
        for stream in streams:
            stream.free()
        return streams

    found, expected = run(pair.gpu), run(pair.reference)
    for slot, ours, theirs in zip(slots, found, expected, strict=True):
        assert ours.output == theirs.output
        places = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        places += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        for a, b in places:
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        assert slot in (LARGER, NEW_ROWS) or max(ours.output) < VOCAB
    drawn = {token for stream in found for token in stream.output}
    assert drawn & set(NEW)
