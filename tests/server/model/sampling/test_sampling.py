"""Sampling against transformers' processors, and the draw against the distribution it must have."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from loraplex.server.engine.plan import RowStart
from loraplex.server.model.sampling import sampling
from loraplex.server.model.sampling.masks import RowMasks
from loraplex.server.model.sampling.sampling import (
    History,
    Penalties,
    RowSampling,
    Sampled,
    apply_history,
    logprobs,
    sample,
)
from loraplex.server.model.steps.rows import Rows
from loraplex.server.protocol import SamplingParams
from tests.grids import beyond

VOCAB = 61
EOS = (2, 5)
CPU = torch.device("cpu")


class Bench:
    """Rows and their parameters as the executor keeps them; rows of the logits in any order."""

    def __init__(self, starts: Sequence[RowStart], vocab: int = VOCAB) -> None:
        self.rows = Rows(len(starts), 64, 4, CPU)
        self.rows.start(starts)
        self.sampling = RowSampling(len(starts), vocab, EOS, CPU)
        self.sampling.start(starts)
        self.lengths = [len(start.token_ids) for start in starts]

    def sample(
        self,
        logits: torch.Tensor,
        order: Sequence[int],
        allowed: Sequence[Sequence[int] | None] | None = None,
    ) -> Sampled:
        """allowed: ids that each of `order` may draw, None = any."""
        seq_rows = torch.tensor(order).numpy()
        lengths = torch.tensor([self.lengths[i] for i in order]).numpy()
        masks = None if allowed is None else row_masks(allowed)
        batch = self.sampling.batch(self.rows, seq_rows, lengths, masks)
        return sample(logits[list(order)].clone(), batch)


def row_masks(allowed: Sequence[Sequence[int] | None], vocab: int = VOCAB) -> RowMasks:
    """Each row's own mask, in reverse order; bits beyond the vocabulary are set."""
    masked = [i for i, ids in enumerate(allowed) if ids is not None][::-1]
    bits = np.zeros((len(masked), -(-vocab // 32) * 32), dtype=np.uint8)
    bits[:, vocab:] = 1
    of = np.full(len(allowed), -1)
    for mask, i in enumerate(masked):
        bits[mask, list(allowed[i] or ())] = 1
        of[i] = mask
    host = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return RowMasks(host, torch.from_numpy(host), of)


def start(
    row: int,
    params: SamplingParams,
    *,
    tokens: Sequence[int] = (7, 8, 9, 7),
    prompt_len: int = 2,
    seed: int = 0,
    choice: int = 0,
    suppressed_until: int = 0,
) -> RowStart:
    return RowStart(row, list(tokens), prompt_len, params, seed, choice, suppressed_until)


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def warpers(params: SamplingParams) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if params.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(params.temperature))
    if params.temperature > 0:
        if params.top_k:
            found.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            found.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            found.append(MinPLogitsWarper(params.min_p))
        if params.typical_p < 1:
            found.append(TypicalLogitsWarper(params.typical_p))
    return found


def oracle(
    params: SamplingParams,
    logits: torch.Tensor,
    suppressed_until: int = 0,
    allowed: Sequence[int] | None = None,
    tokens: Sequence[int] = (7, 8, 9, 7),
    prompt_len: int = 2,
) -> torch.Tensor:
    """Scores after the processors, in the order in which `generate` applies them; the tokens are
    those of `start`."""
    found = LogitsProcessorList()
    if params.logit_bias:
        biases: list[list[list[int] | float]] = [[[i], b] for i, b in params.logit_bias.items()]
        found.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    found.append(Counted(params, tokens[prompt_len:]))
    if suppressed_until:
        found.append(MinNewTokensLengthLogitsProcessor(2, suppressed_until, list(EOS)))
    if allowed is not None:
        found.append(PrefixConstrainedLogitsProcessor(lambda *_: list(allowed), 1))
    found += warpers(params)
    scores: torch.Tensor = found(torch.LongTensor([[*tokens]]), logits.clone())
    return scores[0]


class Counted(LogitsProcessor):
    """OpenAI's two penalties, which transformers does not have."""

    def __init__(self, params: SamplingParams, output: Sequence[int]) -> None:
        self.params, self.output = params, torch.tensor([*output], dtype=torch.long)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(self.output, minlength=scores.shape[1])
        scores = scores - self.params.frequency_penalty * counts
        return scores - self.params.presence_penalty * (counts > 0)


CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=5),
    "top_k_1": SamplingParams(top_k=1),
    "top_k_beyond_vocabulary": SamplingParams(top_k=1000),
    "top_p": SamplingParams(top_p=0.8),
    "top_p_tiny": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.1),
    "typical": SamplingParams(typical_p=0.6),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "bias": SamplingParams(logit_bias={3: 4.0, 60: -100.0}),
    "all": SamplingParams(
        temperature=1.3,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        typical_p=0.9,
        repetition_penalty=1.2,
        logit_bias={7: 2.0, 11: -3.0},
    ),
}


def drawn_distribution(
    params: SamplingParams, logits: torch.Tensor, draws: int, allowed: Sequence[int] | None
) -> torch.Tensor:
    """Frequencies over many seeds, all rows of one batch."""
    bench = Bench([start(row, params, seed=row, suppressed_until=9) for row in range(draws)])
    masks = None if allowed is None else [allowed] * draws
    found = bench.sample(logits.expand(draws, -1), range(draws), masks)
    assert not found.failed.any()
    return torch.bincount(found.token_ids, minlength=logits.shape[1]).double()


ALWAYS = 2  # the seed of an ordinary run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("seed", "allowed"), beyond(1, [(ALWAYS, (2, 3, 7, 9, 31, 32, 60)), (0, None), (1, None)])
)
def test_distribution_is_that_of_transformers(
    case: str, seed: int, allowed: Sequence[int] | None
) -> None:
    params, logits = CASES[case], random_logits(1, seed)
    expected = oracle(params, logits, 9, allowed).double().softmax(-1)
    draws = 8_000 if seed == ALWAYS else 20_000
    counts = drawn_distribution(params, logits, draws, allowed)
    assert counts[expected == 0].sum() == 0
    frequent = expected * draws >= 5
    degrees = int(frequent.sum()) - 1
    statistic = ((counts - expected * draws) ** 2 / (expected * draws))[frequent].sum()
    # Wilson and Hilferty: 3.9 standard deviations, about 1 in 20,000.
    spread = 2 / (9 * max(degrees, 1))
    limit = max(degrees, 1) * (1 - spread + 3.9 * math.sqrt(spread)) ** 3
    assert float(statistic) < limit


# The support alone, over random parameters: exact, unlike frequencies.
@settings(max_examples=60)
@given(
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0.2, 3.0),
        top_k=st.integers(0, 70),
        top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.5]),
        typical_p=st.sampled_from([0.2, 0.7, 1.0]),
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.5]),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=4),
    ),
    seed=st.integers(0, 10_000),
    allowed=st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
)
def test_only_what_transformers_keeps_is_drawn(
    params: SamplingParams, seed: int, allowed: set[int] | None
) -> None:
    ids = None if allowed is None else sorted(allowed)
    logits = random_logits(1, seed)
    scores = oracle(params, logits, allowed=ids)
    bench = Bench([start(row, params, seed=row) for row in range(64)])
    found = bench.sample(logits.expand(64, -1), range(64), [ids] * 64).token_ids
    assert torch.isfinite(scores[found]).all()


@pytest.mark.parametrize("case", CASES)
def test_greedy_ignores_truncation_and_heeds_history(case: str) -> None:
    params = CASES[case]
    greedy = SamplingParams(
        temperature=0.0,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
    )
    logits = random_logits(1, 3)
    scores = oracle(greedy, logits)
    found = Bench([start(0, greedy)]).sample(logits, [0])
    assert found.token_ids.tolist() == [int(scores.argmax())]


def test_frequency_and_presence_count_the_output_only() -> None:
    """OpenAI: logit - count * frequency - (count > 0) * presence. Prompt 7 8, output 9 7 9."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9], logits[0, 7] = 1.0, 2.2, 1.7
    tokens = (7, 8, 9, 7, 9)
    for lift, winner in ((0.0, 8), (0.06, 9)):
        raised = logits.clone()
        raised[0, 9] += lift  # 9 drops by 1.25, 7 by 0.75, 8 not at all
        found = Bench([start(0, params, tokens=tokens)]).sample(raised, [0])
        assert found.token_ids.tolist() == [winner]


@pytest.mark.parametrize("counted", [1, 3, 100])
def test_tokens_are_counted_some_at_a_time(counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths and prompts, padded with ids that must not count."""
    monkeypatch.setattr(sampling, "_COUNTED", counted)
    torch.manual_seed(4)
    lengths, prompts = (9, 1, 4, 7), (4, 1, 0, 7)
    tokens = torch.randint(0, 5, (4, 9), dtype=torch.int32)
    logits = random_logits(4, 11)
    repetition, frequency, presence = (torch.rand(4) + 0.5 for _ in range(3))
    expected = logits.clone()
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        past = tokens[row, :length].tolist()
        for token in set(past):
            score, count = float(logits[row, token]), past[prompt:].count(token)
            score *= float(repetition[row]) if score < 0 else 1 / float(repetition[row])
            expected[row, token] = score - count * frequency[row] - (count > 0) * presence[row]
    penalties = Penalties(
        torch.arange(4), tokens, torch.tensor(prompts), torch.tensor(lengths),
        repetition, frequency, presence,
    )  # fmt: skip
    apply_history(logits, History(penalties=penalties))
    torch.testing.assert_close(logits, expected)


def test_suppressed_until_the_index() -> None:
    params = SamplingParams(temperature=0.0, stop_token_ids=(11,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 11], logits[0, 40] = 9.0, 8.0, 1.0
    for until, expected in ((2, 2), (3, 40)):  # two tokens of output so far
        bench = Bench([start(0, params, suppressed_until=until)])
        assert bench.sample(logits, [0]).token_ids.tolist() == [expected]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([2, 40, 41], 40),  # an end is left out though the mask allows it
        ([41], 41),
        ([2, 11], 2),  # ends alone: the mask wins
        ([11], 11),
        (None, 40),
    ],
)
def test_a_mask_that_allows_suppressed_ids_alone_wins(
    allowed: list[int] | None, expected: int
) -> None:
    params = SamplingParams(temperature=0.0, stop_token_ids=(11,))
    logits = torch.zeros(2, VOCAB)
    logits[:, 2], logits[:, 11], logits[:, 40] = 9.0, 8.0, 1.0
    bench = Bench([start(row, params, suppressed_until=9) for row in range(2)])
    found = bench.sample(logits, [0, 1], [allowed, [2, 50]])
    assert found.token_ids.tolist() == [expected, 50]


def test_a_mask_that_allows_nothing_fails_its_row_alone() -> None:
    bench = Bench([start(row, params, seed=row) for row, params in enumerate(MIXED)])
    logits = random_logits(len(MIXED), 3)
    expected = bench.sample(logits, range(len(MIXED))).token_ids.tolist()
    for row in range(len(MIXED)):
        masks: list[list[int] | None] = [None if i != row else [] for i in range(len(MIXED))]
        found = bench.sample(logits, range(len(MIXED)), masks)
        assert found.failed.tolist() == [i == row for i in range(len(MIXED))]
        expected_now = [0 if i == row else token for i, token in enumerate(expected)]
        assert found.token_ids.tolist() == expected_now


def test_a_mask_that_allows_all_changes_no_draw() -> None:
    bench = Bench([start(row, params, seed=row) for row, params in enumerate(MIXED)])
    logits, order = random_logits(len(MIXED), 3), range(len(MIXED))
    free = bench.sample(logits, order).token_ids.tolist()
    assert bench.sample(logits, order, [range(VOCAB)] * len(MIXED)).token_ids.tolist() == free


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=7),
    SamplingParams(top_p=0.7, repetition_penalty=1.3),
    SamplingParams(typical_p=0.5, frequency_penalty=0.4),
    SamplingParams(temperature=1.5, min_p=0.05, logit_bias={4: 3.0}),
    SamplingParams(temperature=0.0, presence_penalty=0.7, logit_bias={50: 5.0}),
]


@settings(max_examples=50)
@given(order=st.permutations(range(len(MIXED))), keep=st.integers(1, len(MIXED)))
def test_neighbours_do_not_change_a_draw(order: list[int], keep: int) -> None:
    logits = random_logits(len(MIXED), 11)
    starts = [
        start(row, params, seed=100 + row, tokens=(7, 8, *range(row)))
        for row, params in enumerate(MIXED)
    ]
    bench = Bench(starts)
    together = bench.sample(logits, order[:keep]).token_ids.tolist()
    alone = [bench.sample(logits, [row]).token_ids.item() for row in order[:keep]]
    assert together == alone


def test_choices_and_indices_draw_differently() -> None:
    logits = torch.zeros(1, 4096)
    params = SamplingParams()
    starts = [start(c, params, choice=c) for c in range(8)]
    starts += [start(8 + n, params, tokens=[7] * (3 + n), prompt_len=2) for n in range(8)]
    bench = Bench(starts, vocab=4096)
    found = bench.sample(logits.expand(16, -1), range(16)).token_ids.tolist()
    assert len(set(found)) >= 14  # choice 0 and one of the indices may agree by design


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    starts = [start(row, params, seed=row) for row, params in enumerate(MIXED)]
    bench = Bench(starts)
    logits = random_logits(len(MIXED), 2)
    expected = bench.sample(logits, range(len(MIXED))).token_ids.tolist()
    broken = logits.clone()
    broken[3, 17] = bad
    found = bench.sample(broken, range(len(MIXED)))
    assert found.failed.tolist() == [row == 3 for row in range(len(MIXED))]
    assert [t for i, t in enumerate(found.token_ids.tolist()) if i != 3] == [
        t for i, t in enumerate(expected) if i != 3
    ]


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    logits = random_logits(1, 4)
    for temperature in (1e-4, 1e-30, 1e-42):
        bench = Bench([start(0, SamplingParams(temperature=temperature))])
        found = bench.sample(logits, [0])
        assert not found.failed.any()
        assert found.token_ids.tolist() == [int(logits.argmax())]


def test_bias_outside_the_vocabulary_changes_nothing() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={VOCAB: 50.0, 10**9: 50.0, -1: 50.0})
    logits = random_logits(1, 5)
    assert Bench([start(0, params)]).sample(logits, [0]).token_ids.tolist() == [
        int(logits.argmax())
    ]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3, 6)
    ids = torch.tensor([4, 0, 60])
    listed = torch.tensor([[7, 7], [60, 0], [1, 2]])
    found = logprobs(logits, ids, 5, listed)
    expected = logits.double().log_softmax(-1)
    assert found.listed is not None
    assert found.listed.tolist() == pytest.approx(expected.gather(1, listed).numpy(), abs=1e-5)
    assert logprobs(logits, ids, 5).listed is None
    assert found.chosen.tolist() == pytest.approx(expected[range(3), ids].tolist(), abs=1e-5)
    best = expected.topk(5)
    assert found.top_ids.tolist() == best.indices.tolist()
    assert found.top.flatten().tolist() == pytest.approx(best.values.flatten().tolist(), abs=1e-5)
