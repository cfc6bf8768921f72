"""Draws that wait for masks, by the executor."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.executor import Masks
from loraplex.server.engine.plan import StepPlan
from loraplex.server.model.sampling.masks import MaskMemory, RowMasks
from loraplex.server.protocol import SamplingParams
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate, step
from tests.server.model.hub_models import VOCAB, make_model, save_model

GREEDY = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB)
EACH = [
    SamplingParams(temperature=0.0),
    GREEDY,
    SamplingParams(top_p=0.9, logprobs=2),
    SamplingParams(typical_p=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=1),
    SamplingParams(temperature=1.7, top_k=9, min_p=0.01, frequency_penalty=0.3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("base"))


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    found = Driver(folder)
    yield found
    found.close()


def prompt(row: int) -> list[int]:
    return [3 + (7 * row + 11 * i) % (VOCAB - 3) for i in range(3 + row % 5)]


def few(tokens: Sequence[int]) -> list[int]:
    """Others after each token."""
    return [(tokens[-1] * 5 + 3 * i) % (VOCAB - 3) + 3 for i in range(4)]


def streams(driver: Driver, constrained: Sequence[int] = ()) -> list[Stream]:
    return [
        Stream(
            *(driver, row, prompt(row)),
            sampling=EACH[row % len(EACH)],
            seed=row,
        ).bound(few if row in constrained else None)
        for row in range(12)
    ]


def plan_of(jobs: Sequence[Stream]) -> StepPlan:
    """The prompts as one step."""
    return StepPlan(
        step=0,
        new_rows=[start for s in jobs for start in s.start()],
        grants=[grant for s in jobs for grant in s.grant(len(s.tokens))],
        slices=[s.slice(len(s.tokens)) for s in jobs],
        freed_rows=[],
    )


def test_every_token_is_one_that_its_mask_allows(driver: Driver) -> None:
    """Prompts in chunks beside decodes, rows with masks beside rows without."""
    found = streams(driver, constrained=(0, 1, 2, 3, 4, 5, 8, 11))
    step(driver, [(s, 64) for s in found[:6]])
    generate(driver, found, 7, 2)
    for stream in found:
        if stream.allowed is not None:
            for i in range(stream.prompt_len, len(stream.tokens)):
                assert stream.tokens[i] in few(stream.tokens[:i])


def test_neighbours_draw_what_they_draw_without_constrained_rows(folder: Path) -> None:
    def outputs(constrained: Sequence[int]) -> list[list[int]]:
        driver = Driver(folder)
        found = streams(driver, constrained)
        generate(driver, found, 6, 3)
        driver.close()
        return [s.output for s in found]

    free, mixed = outputs(()), outputs((1, 4, 6, 9))
    for row in range(12):
        assert (free[row] == mixed[row]) == (row not in (1, 4, 6, 9))


def test_greedy_takes_the_best_that_is_allowed_and_logprobs_are_of_all(driver: Driver) -> None:
    ids = prompt(2)
    free = Stream(driver, 0, ids, sampling=GREEDY)
    bound = Stream(driver, 1, ids, sampling=GREEDY).bound(few)
    step(driver, [(free, 64), (bound, 64)])
    scores = dict(free.logprobs[0].top)
    assert dict(bound.logprobs[0].top) == pytest.approx(scores, abs=1e-5)
    best = max(few(ids), key=lambda token: scores[token])
    assert bound.output == [best]
    assert bound.logprobs[0].token_id == best
    assert bound.logprobs[0].logprob == pytest.approx(scores[best], abs=1e-5)


def test_a_constrained_slice_without_a_mask_draws_any_token(folder: Path) -> None:
    driver, other = Driver(folder), Driver(folder)
    free = [other.run(plan_of(streams(other)))]
    ticket = driver.executor.launch(plan_of(streams(driver, range(12))))
    allowed: list[list[int] | None] = [None] * 12
    allowed[3] = [17]
    driver.executor.constrain(ticket, driver.masks(allowed))
    found = [result.token_ids[0] for result in driver.executor.collect(ticket)]
    assert found == [17 if i == 3 else result.token_ids[0] for i, result in enumerate(free[0])]


def test_a_step_is_ready_only_after_its_masks(driver: Driver) -> None:
    found = streams(driver, constrained=(2, 5))
    plan = plan_of(found)
    ticket = driver.executor.launch(plan)
    assert not ticket.ready()
    with pytest.raises(RuntimeError, match="before its masks"):
        driver.executor.collect(ticket)
    with pytest.raises(ValueError, match="another|does not wait"):
        driver.executor.constrain(ticket, driver.masks([None, [4]]))
    masks: list[list[int] | None] = [[4] if i in (2, 5) else None for i in range(12)]
    driver.executor.constrain(ticket, driver.masks(masks))
    assert ticket.ready()
    with pytest.raises(ValueError, match="no draw"):
        driver.executor.constrain(ticket, driver.masks(masks))
    results = driver.executor.collect(ticket)
    assert [results[2].token_ids[0], results[5].token_ids[0]] == [4, 4]


def test_the_next_step_goes_on_from_the_masked_token(driver: Driver) -> None:
    """It is on the device already; the plan does not bring it."""
    ids, forced = prompt(4), [9, 30, 12]
    free = Stream(driver, 0, [*ids, *forced], sampling=GREEDY)
    bound = Stream(driver, 1, ids, sampling=GREEDY)
    bound.bound(lambda tokens: [forced[len(tokens) - len(ids)]])
    generate(driver, [bound], 3, 64)
    assert bound.output == forced
    bound.allowed = None
    generate(driver, [bound], 4, 64)
    generate(driver, [free], 1, 64)
    assert bound.output[3:] == free.output


def test_a_mask_of_nothing_fails_its_row_alone(driver: Driver) -> None:
    found = streams(driver, constrained=(1, 7))
    found[7].allowed = lambda _: []
    step(driver, [(s, 64) for s in found])
    assert [s.failed for s in found] == [row == 7 for row in range(12)]
    assert found[1].output[0] in few(prompt(1))


def test_ends_that_a_mask_leaves_alone_are_drawn_before_min_tokens(driver: Driver) -> None:
    """2 is the end. The first mask allows another token as well, the second does not."""
    bias = SamplingParams(temperature=0.0, logit_bias={2: 99.0})
    allowed = [[2, 8], [2]]
    stream = Stream(driver, 0, [5, 6], sampling=bias, suppressed_until=9)
    stream.bound(lambda tokens: allowed[len(tokens) - 2])
    generate(driver, [stream], 2, 64)
    assert stream.output == [8, 2]


ids = st.integers(0, 69)


@given(allowed=st.sets(ids), others=st.sets(ids))
def test_whether_a_mask_allows_other_ids(allowed: set[int], others: set[int]) -> None:
    bits = np.zeros((2, 96), dtype=np.uint8)
    bits[1, list(allowed)] = 1
    bits[1, 70:] = 1  # beyond the vocabulary
    host = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    before = host.copy()
    masks = RowMasks(host, torch.from_numpy(host), np.array([-1, 1]))
    suppressed = np.array(sorted(others), dtype=np.int64)
    assert masks.allows_others(1, suppressed, 70) == bool(allowed - others)
    assert masks.allows_others(0, suppressed, 70)
    assert (host == before).all()


def test_masks_of_other_memory_are_taken_too() -> None:
    memory = MaskMemory(4, torch.device("cpu"))
    assert memory.take(3, 3).shape == (3, 3)
    own = np.arange(6, dtype=np.int32).reshape(2, 3)
    found = memory.upload(Masks([4, 9], own), [9, -1, 4])
    assert found is not None
    assert found.of.tolist() == [1, -1, 0]
    assert found.bits.tolist() == own.tolist()
