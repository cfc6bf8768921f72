"""Everything a request may ask of a draw, with masks: our kernels against plain torch."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from loraplex.server.constraints.rules import mask_words
from loraplex.server.engine.executor import Masks
from loraplex.server.engine.plan import RowStart
from loraplex.server.model.sampling.draws_cuda import CudaDraws
from loraplex.server.model.sampling.masks import MaskMemory, RowMasks, ToDraw
from loraplex.server.model.sampling.results import HostLogprobs
from loraplex.server.model.sampling.sampler import Draws, Sampler, TorchDraws
from loraplex.server.model.sampling.sampling import RowSampling, apply_history, apply_masks
from loraplex.server.model.steps.rows import Rows
from loraplex.server.protocol import SamplingParams
from tests.grids import beyond, sparse
from tests.kernels.test_draw import kept, random_logits

END, PLACE, PROMPT = 2, 12, 7
# A whole number of words of masks, and some ids fewer.
WORDS = {"cpu": 11, "cuda": 4008}
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(logprobs=0),
    SamplingParams(temperature=1.7, top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=0.6, top_k=50, top_p=0.8, min_p=0.01, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.8, presence_penalty=-0.5, top_p=0.95),
    SamplingParams(temperature=0.0, logit_bias={9: 50.0, 40: 60.0}),
    SamplingParams(logit_bias={9: -60.0, END: 90.0}, top_k=20, logprobs=1),
    SamplingParams(typical_p=0.7),
]
EACH = [params for params in PARAMS for _ in range(4)]
CHOICES = ("none", "few", "half", "end alone")


def starts(suppressed_until: int) -> list[RowStart]:
    """Rows in another order than their draws."""
    return [
        RowStart(
            len(EACH) - 1 - i,
            [(5 * i + 3 * j) % 60 for j in range(PLACE)],
            PROMPT,
            params,
            (i + 1) * 0x9E3779B97F4A7C15 % 2**64,
            i,
            suppressed_until,
        )
        for i, params in enumerate(EACH)
    ]


def cuda_draws(rows: Rows, parameters: RowSampling) -> CudaDraws:
    return CudaDraws(rows, parameters, len(EACH))


class Bench:
    """The same rows, drawn for by either."""

    def __init__(
        self,
        make: Callable[[Rows, RowSampling], Draws],
        logits: torch.Tensor,
        suppressed_until: int,
    ) -> None:
        device, vocab = logits.device, logits.shape[1]
        self.rows = Rows(len(EACH), 64, 16, device)
        self.parameters = RowSampling(len(EACH), vocab, (END,), device)
        self.rows.start(starts(suppressed_until))
        self.parameters.start(starts(suppressed_until))
        self._sampler = Sampler(self.rows, self.parameters, make(self.rows, self.parameters))
        n = len(EACH)
        which = np.arange(n) * 5 % len(logits)
        self.all = ToDraw(logits, which, np.arange(n)[::-1].copy(), np.full(n, PLACE))

    def draw(self, masks: RowMasks | None) -> tuple[list[int], HostLogprobs]:
        rows = ToDraw(self.all.logits, self.all.which, self.all.seq_rows, self.all.lengths, masks)
        drawn = self._sampler.draw(rows, np.arange(len(EACH)))
        found: list[int] = drawn.token_ids.tolist()
        written = self.rows.tokens[self.all.seq_rows.tolist(), PLACE].tolist()
        assert written == [max(token, 0) for token in found]
        [logprobs] = drawn.logprobs
        return found, logprobs


def allowed_ids(vocab: int) -> list[np.ndarray | None]:
    """Of each draw, as CHOICES go round."""
    rng = np.random.default_rng(3)
    found: list[np.ndarray | None] = []
    for i in range(len(EACH)):
        order = rng.permutation(vocab)
        ids = (None, order[:3], order[: vocab // 2], np.array([END]))[i % len(CHOICES)]
        found.append(ids)
    return found


def uploaded(allowed: Sequence[np.ndarray | None], vocab: int, device: torch.device) -> RowMasks:
    slices = [i for i, ids in enumerate(allowed) if ids is not None]
    memory = MaskMemory(len(allowed), device)
    bits = memory.take(len(slices), mask_words(vocab))
    flags = np.zeros((len(slices), 32 * bits.shape[1]), dtype=np.uint8)
    flags[:, vocab:] = 1  # beyond the vocabulary
    for mask, i in enumerate(slices):
        flags[mask, allowed[i]] = 1
    bits[:] = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    masks = memory.upload(Masks(slices, bits), range(len(allowed)))
    assert masks is not None
    return masks


def bent_scores(bench: Bench, masks: RowMasks) -> torch.Tensor:
    """What is drawn from, by plain torch: float32 `[draws, vocab]`."""
    rows = bench.all
    scores = rows.logits[torch.from_numpy(rows.which).to(rows.logits.device)].float()
    asked = bench.parameters.batch(bench.rows, rows.seq_rows, rows.lengths, masks)
    apply_history(scores, asked.history)
    assert asked.allowed is not None
    apply_masks(scores, asked.allowed)
    return scores


def assert_same(found: int, expected: int, scores: torch.Tensor, params: SamplingParams) -> None:
    """Sums may round differently: then nothing that has mass lies between the two."""
    if found == expected:
        return
    assert params.temperature > 0
    mass = kept(scores.double().cpu(), params)
    low, high = sorted((found, expected))
    assert min(mass[low], mass[high]) > 0
    assert mass[low + 1 : high].sum() <= 1e-5 * mass.sum()


def logits_of(device: torch.device, dtype: torch.dtype, missing: int) -> torch.Tensor:
    vocab = 32 * WORDS[device.type] - missing
    return random_logits((len(EACH), vocab), missing, device).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "lacks"), sparse([torch.bfloat16, torch.float32], [(0, 9), (29, 0)])
)
def test_draws_are_those_of_plain_torch(
    device: torch.device, dtype: torch.dtype, lacks: tuple[int, int]
) -> None:
    """lacks: ids that the masks' last word has and the logits do not, and the tokens before which
    none ends."""
    missing, suppressed_until = lacks
    logits = logits_of(device, dtype, missing)
    allowed = allowed_ids(logits.shape[1])
    masks = uploaded(allowed, logits.shape[1], device)
    ours, plain = (Bench(make, logits, suppressed_until) for make in (cuda_draws, TorchDraws))
    (found, logprobs), (expected, _) = ours.draw(masks), plain.draw(masks)
    scores = bent_scores(plain, masks)
    for i, params in enumerate(EACH):
        ids = allowed[i]
        assert ids is None or found[i] in ids
        if suppressed_until and CHOICES[i % len(CHOICES)] != "end alone":
            assert found[i] != END
        assert_same(found[i], expected[i], scores[i], params)
    raw = logits[torch.from_numpy(ours.all.which).to(device)].float().log_softmax(-1).cpu()
    for place, values in zip(logprobs.places, logprobs.values.chosen.tolist(), strict=True):
        assert values == pytest.approx(float(raw[place, found[place]]), abs=1e-3)


@pytest.mark.parametrize("dtype", beyond(1, [torch.bfloat16, torch.float32]))
def test_rows_without_a_mask_draw_as_if_nobody_had_one(
    device: torch.device, dtype: torch.dtype
) -> None:
    logits = logits_of(device, dtype, 5)
    bench = Bench(cuda_draws, logits, 0)
    free, _ = bench.draw(None)
    masked, _ = bench.draw(uploaded(allowed_ids(logits.shape[1]), logits.shape[1], device))
    same = [a == b for a, b in zip(free, masked, strict=True)]
    assert all(same[:: len(CHOICES)])
    assert not all(same)
